"""A model repository on the hub, to which exports are pushed."""

from pathlib import Path

from lightning_rl.data.hub_faults import patiently
from lightning_rl.errors import ConfigError, HubError, first_line


class HubModel:
    """Pushes folders to a repository, each as one commit, with huggingface_hub's own token.

    Args:
        name: ``owner/model``; without an owner, the token's owner.
        private: if the repository is created, make it private.
    """

    def __init__(self, name: str, private: bool) -> None:
        self.name = name
        self.private = private

    def open(self) -> None:
        """Check before training that the repository can be written, and create it if necessary.

        Raises:
            ConfigError: saying what is missing.
        """
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.errors import HFValidationError

        argument = f"HFExport: push_to_hub={self.name!r}"
        if constants.is_offline_mode():
            raise ConfigError(f"{argument}, but HF_HUB_OFFLINE is set; unset it, or push later")
        if get_token() is None:
            raise ConfigError(f"{argument} needs a token; set HF_TOKEN, or run `hf auth login`")
        try:
            made = patiently(
                lambda: HfApi().create_repo(self.name, private=self.private, exist_ok=True)
            )
        except HFValidationError as error:
            raise ConfigError(f"{argument} is not a valid repository name: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"{argument}: the hub ({constants.ENDPOINT}) refuses access: "
                f"{first_line(error)}; check the name, and that the token has write permission"
            ) from error
        self.name = made.repo_id

    def push(self, folder: Path, message: str) -> None:
        """Upload a folder as one commit; skips large files that an interrupted push already
        uploaded.

        Raises:
            HubError: if it failed after several tries; the branch is unchanged.
        """
        from huggingface_hub import HfApi

        try:
            patiently(
                lambda: HfApi().upload_folder(
                    repo_id=self.name, folder_path=folder, commit_message=message
                )
            )
        except Exception as error:
            raise HubError(
                f"{folder} could not be pushed to {self.name!r}: {first_line(error)}. The export "
                f"is complete; push it with `hf upload {self.name} {folder}`"
            ) from error
