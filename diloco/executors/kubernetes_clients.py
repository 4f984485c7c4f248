"""The cluster's API through the official client, answers as JSON, refusals as errors that say what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, DilocoError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TIMEOUT = (5.0, 60.0)
"""Seconds to connect, and to wait for an answer."""

_OWN_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"  # in a pod


class Clients:
    """The APIs that an executor uses. `kubeconfig` and `context` as kubectl takes them; without any of both, and inside
    a pod, the pod's ServiceAccount. `eks` are name and region of a cluster that needs no kubeconfig.

    Raises ConfigurationError if there is no cluster to talk to.
    """

    def __init__(
        self, kubeconfig: Path | None = None, context: str | None = None, *, eks: tuple[str, str] | None = None
    ) -> None:
        try:
            from kubernetes import client, config  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise ConfigurationError(
                "--backend kubernetes needs the official client: pip install 'diloco-aws[kubernetes]'"
            ) from None
        try:
            if eks is None:
                self._api = self._connect(config, kubeconfig, context)
            else:
                from diloco.eks import kubeconfig as of_cluster

                self._api = config.new_client_from_config_dict(of_cluster(*eks))
        except config.ConfigException as problem:
            where = f"{kubeconfig}" if kubeconfig else "$KUBECONFIG or ~/.kube/config"
            raise ConfigurationError(
                f"no cluster: {where}: {problem}: name a file by --kubeconfig, and one of its contexts by --context"
            ) from None
        self.batch = client.BatchV1Api(self._api)
        self.core = client.CoreV1Api(self._api)
        self.custom = client.CustomObjectsApi(self._api)

    @staticmethod
    def _connect(config: Any, kubeconfig: Path | None, context: str | None) -> Any:
        try:
            return config.new_client_from_config(None if kubeconfig is None else str(kubeconfig), context=context)
        except config.ConfigException:
            if kubeconfig is not None or context is not None:
                raise
            try:
                config.load_incluster_config()
            except config.ConfigException:
                pass
            else:
                from kubernetes.client import ApiClient  # type: ignore[import-untyped]

                return ApiClient()
            raise

    @staticmethod
    def namespace(kubeconfig: Path | None = None, context: str | None = None) -> str:
        """The namespace that kubectl would use."""
        from kubernetes import config

        try:
            contexts, active = config.list_kube_config_contexts(None if kubeconfig is None else str(kubeconfig))
        except config.ConfigException:
            mine = Path(_OWN_NAMESPACE)
            return mine.read_text().strip() if mine.exists() else "default"
        chosen = next((each for each in contexts if each["name"] == context), active)
        return str(chosen.get("context", {}).get("namespace") or "default")


def ask(call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Call the API; the answer as JSON. Raises DilocoError."""
    found = try_to(call, *arguments, **options)
    if found is None:
        raise DilocoError(f"{_what(arguments)}: not there any more: somebody deleted it")
    return found


def try_to(call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any] | None:
    """Call the API; None for what is not there. Raises DilocoError."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        answer = call(*arguments, **options, _preload_content=False, _request_timeout=TIMEOUT)
        found: dict[str, Any] = json.loads(answer.data)
    except ApiException as problem:
        if problem.status == 404:
            return None
        raise explained(problem) from None
    except HTTPError as problem:
        raise DilocoError(f"the cluster does not answer: {problem}: check the network and `kubectl version`") from None
    return found


@dataclass(frozen=True)
class CustomResource:
    """A kind of object of another project, which a cluster may lack."""

    group: str
    version: str
    plural: str
    project: str
    """To install, in messages."""
    workload: str
    """What `--workload` calls it."""

    @property
    def api_version(self) -> str:
        """As an object has it."""
        return f"{self.group}/{self.version}"

    def find(self, clients: Clients, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Those that a label selector names; none where the project is not installed. Raises DilocoError."""
        call = clients.custom.list_namespaced_custom_object
        found = try_to(call, self.group, self.version, namespace, self.plural, label_selector=selector)
        return [] if found is None else list(found["items"])

    def create(self, clients: Clients, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Raises TakenError if one of that name is there, ConfigurationError where the project is not installed, else
        DilocoError.
        """
        call = clients.custom.create_namespaced_custom_object
        kind = (self.group, self.version, namespace, self.plural)
        if try_to(call, *kind, manifest, field_validation="Strict") is None:
            raise ConfigurationError(
                f"the cluster has no {self.plural}.{self.group}: install {self.project}, or leave out"
                f" --workload {self.workload}"
            )

    def delete(self, clients: Clients, namespace: str, name: str) -> None:
        """Begin to delete it and all that it owns; one that is not there needs nothing. Raises DilocoError."""
        call = clients.custom.delete_namespaced_custom_object
        kind = (self.group, self.version, namespace, self.plural)
        try_to(call, *kind, name, propagation_policy="Foreground")


class TakenError(DilocoError):
    """An object of that name is there already."""


def explained(problem: Any) -> DilocoError:
    """An API's refusal as an error that says what to do."""
    try:
        text = json.loads(problem.body)["message"]
    except (ValueError, TypeError, KeyError):
        text = f"{problem.status} {problem.reason}"
    if problem.status == 401:
        return ConfigurationError(f"the cluster does not know who you are ({text}): log in anew")
    if problem.status == 403 and "is forbidden: User" in text:
        kinds = {"batch.volcano.sh": "volcano", "ray.io": "rayjob"}
        more = next((f" --workload {kind}" for group, kind in kinds.items() if f'API group "{group}"' in text), "")
        return ConfigurationError(f"{text}: bind the Role that `access --cloud kubernetes{more}` prints")
    if problem.status in (400, 403, 422):
        return ConfigurationError(f"the cluster refuses it: {text}")
    if problem.status == 409 and "already exists" in text:
        return TakenError(text)
    return DilocoError(f"the cluster: {text}")


def _what(arguments: tuple[Any, ...]) -> str:
    return "/".join(str(each) for each in arguments if isinstance(each, str))
