"""A pod's specification as a kubelet reads it: environment, volumes, user, command."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

from tests.support.cluster.container import Mount, User

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}


class CreateContainerConfigError(Exception):
    """The container can't be made as the pod says; the text is the kubelet's."""


def environment(core: Any, pod: Any, container: Any, base: Mapping[str, str]) -> dict[str, str]:
    """The container's variables over the image's. Raises CreateContainerConfigError for a Secret that is not there."""
    env = {**base, "HOSTNAME": pod.spec.hostname or pod.metadata.name}
    for source in container.env_from or ():
        if source.secret_ref is not None:
            found = _secret(core, pod, source.secret_ref.name, bool(source.secret_ref.optional))
            env |= {f"{source.prefix or ''}{key}": value for key, value in found.items()}
    for variable in container.env or ():
        value = _value(core, pod, variable)
        if value is not None:
            env[variable.name] = expand(value, env)
    return env


def expand(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` by its value, as Kubernetes does it; names that are not there stay as they are."""

    def replaced(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return env.get(found[1], found[0])

    return _REFERENCE.sub(replaced, text)


def command(container: Any, entrypoint: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """`command` replaces the image's entrypoint, `args` follow."""
    return [expand(word, env) for word in [*(container.command or entrypoint), *(container.args or ())]]


def user(pod: Any, container: Any) -> User:
    """As whom it runs. Raises CreateContainerConfigError for root where the pod forbids it."""
    of_pod, own = pod.spec.security_context, container.security_context

    def setting(name: str) -> Any:
        mine = getattr(own, name, None)
        return getattr(of_pod, name, None) if mine is None else mine

    uid = setting("run_as_user") or 0
    if setting("run_as_non_root") and uid == 0:
        raise CreateContainerConfigError("container has runAsNonRoot and image will run as root")
    group = getattr(of_pod, "fs_group", None)
    dropped = getattr(getattr(own, "capabilities", None), "drop", None) or []
    return User(
        uid=uid,
        gid=setting("run_as_group") or 0,
        groups=() if group is None else (group,),
        new_privileges=getattr(own, "allow_privilege_escalation", None) is not False,
        capabilities="ALL" not in dropped,
    )


def mounts(pod: Any, container: Any, folder: Path, tokens: Mapping[str, Path]) -> list[Mount]:
    """The container's mounts; volumes are folders below `folder`, or in memory. `tokens` are projected volumes."""
    volumes = {volume.name: volume for volume in pod.spec.volumes or ()}
    found = []
    for mount in container.volume_mounts or ():
        volume = volumes[mount.name]
        kind = "ro" if mount.read_only else "rw"
        if volume.empty_dir is not None and volume.empty_dir.medium == "Memory":
            limit = volume.empty_dir.size_limit
            found.append(Mount("memory", f"size={size(limit)}" if limit else "size=50%", mount.mount_path))
        elif volume.empty_dir is not None:
            found.append(Mount(kind, str(_folder(folder / volume.name)), mount.mount_path))
        elif mount.name in tokens:
            found.append(Mount("ro", str(tokens[mount.name]), mount.mount_path))
        else:
            raise CreateContainerConfigError(f"volume {mount.name}: this kubelet has emptyDir and token volumes only")
    return found


def projected(core: Any, pod: Any, folder: Path) -> dict[str, Path]:
    """Write the pod's projected volumes: tokens of its ServiceAccount, the cluster's certificate, its namespace."""
    found = {}
    for volume in pod.spec.volumes or ():
        if volume.projected is None:
            continue
        found[volume.name] = folder / volume.name
        found[volume.name].mkdir(parents=True, exist_ok=True)
        for source in volume.projected.sources:
            if source.service_account_token is not None:
                wanted = source.service_account_token
                text = token(core, pod, wanted.audience, wanted.expiration_seconds or 3600)
                (found[volume.name] / wanted.path).write_text(text)
    return found


def token(core: Any, pod: Any, audience: str | None, seconds: int) -> str:
    """A token of the pod's ServiceAccount, bound to the pod."""
    request = {
        "spec": {
            "audiences": [] if audience is None else [audience],
            "expirationSeconds": seconds,
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": pod.metadata.uid},
        }
    }
    answer = core.create_namespaced_service_account_token(
        pod.spec.service_account_name, pod.metadata.namespace, request
    )
    return str(answer.status.token)


def size(quantity: str) -> int:
    """Bytes of a Kubernetes quantity."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", str(quantity))
    if found is None:
        raise CreateContainerConfigError(f"quantity {quantity}")
    return int(found[1]) * _UNITS[found[2]]


def _folder(path: Path) -> Path:
    if not path.exists():
        path.mkdir(parents=True)
        path.chmod(0o1777)
    return path


def _value(core: Any, pod: Any, variable: Any) -> str | None:
    source = variable.value_from
    if source is None:
        return variable.value or ""
    if source.field_ref is not None:
        return _field(pod, source.field_ref.field_path)
    if source.secret_key_ref is not None:
        reference = source.secret_key_ref
        found = _secret(core, pod, reference.name, bool(reference.optional))
        if reference.key not in found and not reference.optional:
            raise CreateContainerConfigError(f"couldn't find key {reference.key} in Secret {reference.name}")
        return found.get(reference.key)
    raise CreateContainerConfigError(f"variable {variable.name}: this kubelet knows fieldRef and secretKeyRef only")


def _field(pod: Any, path: str) -> str:
    subscript = _SUBSCRIPT.fullmatch(path)
    if subscript is not None:
        return str((getattr(pod.metadata, subscript[1]) or {}).get(subscript[2], ""))
    simple = {
        "metadata.name": pod.metadata.name,
        "metadata.namespace": pod.metadata.namespace,
        "metadata.uid": pod.metadata.uid,
        "spec.nodeName": pod.spec.node_name,
        "spec.serviceAccountName": pod.spec.service_account_name,
        "status.podIP": "127.0.0.1",
        "status.hostIP": "127.0.0.1",
    }
    return str(simple[path])


def _secret(core: Any, pod: Any, name: str, optional: bool) -> dict[str, str]:
    from kubernetes.client import ApiException  # type: ignore[import-untyped]

    try:
        found = core.read_namespaced_secret(name, pod.metadata.namespace)
    except ApiException as problem:
        if problem.status == 404 and optional:
            return {}
        if problem.status == 404:
            raise CreateContainerConfigError(f'secret "{name}" not found') from None
        raise
    return {key: base64.b64decode(value).decode() for key, value in (found.data or {}).items()}
