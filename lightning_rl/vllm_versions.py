"""Which versions of vLLM the engines are made for, and what the older ones of them cannot do.

Found by running the engines' tests on each: ``install/other_vllm.sh VERSION`` does so again.
"""

from packaging.specifiers import SpecifierSet

IN_PROCESS = SpecifierSet(">=0.28,<0.33")
"""With which ``VLLMLocal`` works."""

_LACKING = (
    (
        SpecifierSet("<0.32"),
        "VLLMServer needs 0.32: older servers do not say which weights wrote a token",
    ),
)


def is_supported(version: str) -> bool:
    """Whether the adapter is made for a version of vLLM, build tags such as ``+cpu`` aside."""
    return IN_PROCESS.contains(_release(version), prereleases=True)


def lacking(version: str) -> list[str]:
    """What of this library does not work with a supported version; empty with the newest."""
    release = _release(version)
    return [why for older, why in _LACKING if older.contains(release, prereleases=True)]


def _release(version: str) -> str:
    return version.split("+")[0]
