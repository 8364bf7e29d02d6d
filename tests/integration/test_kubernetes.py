"""Test the manifests of launch/kubernetes, against Kubernetes' own schemas, unknown fields refused.

A RayJob is KubeRay's; no package has its schema. Its pods are Kubernetes' and are checked as such.
"""

import shlex
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.two_ranks import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "launch" / "kubernetes"
VERSIONS = ("1.31", "1.37")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    [found] = [document for document in documents(name) if document["kind"] == kind]
    return found


def validate(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def ray_pods() -> Iterator[dict[str, Any]]:
    """Yield the RayJob's pod templates, each as a pod."""
    cluster = of_kind("rayjob.yaml", "RayJob")["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}


def test_the_manifests_are_valid():
    for document in (*documents("runs.yaml"), *documents("job.yaml"), *ray_pods()):
        validate(document)


def test_a_field_that_does_not_exist_is_refused():
    job = deepcopy(of_kind("job.yaml", "Job"))
    job["spec"]["template"]["spec"]["terminationGracePeriod"] = 300
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        validate(job)


def test_the_pods_of_the_job_find_each_other():
    job, service = (of_kind("job.yaml", kind) for kind in ("Job", "Service"))
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    variables = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert int(variables["NODES"]) == spec["completions"] == spec["parallelism"]
    gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(variables["PROCESSES"]) == gpus
    assert int(variables["SAVE_SECONDS"]) < pod["terminationGracePeriodSeconds"]


def test_what_the_manifests_name_is_there():
    claim = of_kind("runs.yaml", "PersistentVolumeClaim")["metadata"]["name"]
    command = of_kind("job.yaml", "Job")["spec"]["template"]["spec"]["containers"][0]["command"]
    entrypoint = shlex.split(of_kind("rayjob.yaml", "RayJob")["spec"]["entrypoint"])
    files = [word for word in (*command, *entrypoint) if word.startswith(("launch/", "recipes/"))]
    assert len(files) == 4
    assert [file for file in files if not (ROOT / file).is_file()] == []
    for name in ("job.yaml", "rayjob.yaml"):
        assert f"claimName: {claim}" in (FOLDER / name).read_text()
