"""deploy/: the fields of mpijob.yaml are those of the published definition, and agree with the image."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
MPIJOB = ROOT / "deploy" / "mpijob.yaml"

# Of MPIJob v2beta1 as mpi-operator 0.8.2 defines it: types, or the values that a field may have; all that there is down
# to the template of a pod, and of that what mpijob.yaml needs.
CONTAINER = {
    "command": [str],
    "image": str,
    "name": str,
    "readinessProbe": {"periodSeconds": int, "tcpSocket": {"port": int}},
    "resources": {"limits": {str: str}},
    "securityContext": {"runAsUser": int},
    "volumeMounts": [{"mountPath": str, "name": str}],
}
REPLICA = {
    "replicas": int,
    "restartPolicy": {"Never", "OnFailure"},
    "template": {
        "metadata": {str: object},
        "spec": {
            "containers": [CONTAINER],
            "volumes": [{"name": str, "emptyDir": {"medium": str, "sizeLimit": str}}],
        },
    },
}
SPEC = {
    "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
    "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
    "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
    "runLauncherAsWorker": bool,
    "runPolicy": {
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "cleanPodPolicy": {"None", "Running", "All"},
        "managedBy": str,
        "schedulingPolicy": {str: object},
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
    "slotsPerWorker": int,
    "sshAuthMountPath": str,
}
JOB = {"apiVersion": {"kubeflow.org/v2beta1"}, "kind": {"MPIJob"}, "metadata": {"name": str}, "spec": SPEC}


def differences(value: Any, allowed: Any, path: str = "") -> list[str]:
    """What of ``value`` is not ``allowed``: a type, a set of values, or a list or dictionary of what is allowed."""
    if isinstance(allowed, dict):
        if not isinstance(value, dict):
            return [f"{path}: {value!r}"]
        found = []
        for key, item in value.items():
            rule = allowed.get(key, allowed.get(str))
            found += [f"{path}.{key}: no such field"] if rule is None else differences(item, rule, f"{path}.{key}")
        return found
    if isinstance(allowed, list):
        assert isinstance(value, list), path
        return [text for n, item in enumerate(value) for text in differences(item, allowed[0], f"{path}[{n}]")]
    fits = value in allowed if isinstance(allowed, set) else type(value) is allowed or allowed is object
    return [] if fits else [f"{path}: {value!r}"]


@pytest.fixture
def job() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    with MPIJOB.open() as file:
        loaded: dict[str, Any] = yaml.safe_load(file)
    return loaded


def test_every_field_is_defined(job: dict[str, Any]) -> None:
    assert differences(job, JOB) == []
    job["spec"]["slots"] = 2
    job["spec"]["runPolicy"]["cleanPodPolicy"] = "Completed"
    assert differences(job, JOB) == [".spec.runPolicy.cleanPodPolicy: 'Completed'", ".spec.slots: no such field"]


def test_the_job_fits_the_image(job: dict[str, Any]) -> None:
    launcher, worker = (
        job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker")
    )
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    assert re.findall(r"'\s*Port (\d+)'", DOCKERFILE) == [str(port)] * 2  # of sshd and of ssh
    home = job["spec"]["sshAuthMountPath"].removesuffix("/.ssh")
    assert f"WORKDIR {home}\n" in DOCKERFILE and f"HostKey {home}/.ssh/id_rsa" in DOCKERFILE
    assert f"USER {Path(home).name}\n" in DOCKERFILE
    assert f"> {worker['command'][-1]} " in DOCKERFILE
    for container in (launcher, worker):
        assert f"--uid {container['securityContext']['runAsUser']} " in DOCKERFILE
    program = Path(launcher["command"][1])
    assert f"COPY examples {program.parent}\n" in DOCKERFILE and (ROOT / "examples" / program.name).exists()


def test_the_image_has_the_sources() -> None:
    lines = re.findall(r"^COPY ((?!--from).*) \S+$", DOCKERFILE, re.MULTILINE)
    copied = {word for line in lines for word in line.split()}
    assert all((ROOT / source).exists() for source in copied)
    assert set(runpy.run_path(str(ROOT / "tools" / "environment.py"))["SOURCES"]) <= copied
