"""A Pulumi provider over a table of resource classes and functions: what is the same whatever they are."""

# ruff: noqa: N802 (gRPC's names)
from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError
from pulumi.provider.experimental import provider as api
from pulumi.provider.experimental import server
from pulumi.provider.experimental.property_value import PropertyValue
from pulumi.runtime.proto import provider_pb2, status_pb2
from pulumi.runtime.rpc import UNKNOWN

from tests.support.providers import declared
from tests.support.providers.dropped import DROPPED
from tests.support.providers.resource import PartlyMadeError, RefusedError, Resource
from tests.support.providers.values import Plain, has_unknown, plain_map, wire_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class StandInProvider(api.Provider):
    """Dispatches the engine's calls to `resources` and `functions`, both by token, each call in a thread of its own."""

    def __init__(
        self,
        package: str,
        resources: Mapping[str, type[Resource]],
        functions: Mapping[str, Callable[[Any, Plain], Plain]],
        configure: Callable[[Plain], Any],
    ) -> None:
        self._package = package
        self._resources = resources
        self._functions = functions
        self._make_session = configure
        self._session: Any = None

    async def get_schema(self, _: api.GetSchemaRequest) -> api.GetSchemaResponse:
        return api.GetSchemaResponse(schema=f'{{"name": "{self._package}"}}')

    async def check_config(self, request: api.CheckRequest) -> api.CheckResponse:
        known = declared.provider(self._package).arguments
        extra = {"version", "pluginDownloadURL", "__internal"}
        failures = [
            api.CheckFailure(name, f"no such configuration key {self._package}:{name}")
            for name in sorted(request.new_inputs.keys() - known - extra)
        ]
        return api.CheckResponse(inputs=request.new_inputs, failures=failures)

    async def diff_config(self, request: api.DiffRequest) -> api.DiffResponse:
        # The servicer of this SDK can't marshal a detailed diff of a provider, so only names are told.
        old, new = plain_map(request.old_state), plain_map(request.new_inputs)
        changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        return api.DiffResponse(changes=bool(changed), diffs=changed)

    async def configure(self, request: api.ConfigureRequest) -> api.ConfigureResponse:
        self._session = await asyncio.to_thread(self._make_session, plain_map(request.args))
        # Without accept_secrets the engine unwraps secrets, and marks the outputs of the same name itself.
        return api.ConfigureResponse(supports_preview=True)

    async def check(self, request: api.CheckRequest) -> api.CheckResponse:
        token = _type_of(request.urn)
        cls = self._resources.get(token)
        if cls is None:
            return api.CheckResponse(failures=[api.CheckFailure("", f"the stand-in has no resource type {token}")])
        inputs, problems = cls(self._session).check(
            request.name, plain_map(request.new_inputs), plain_map(request.old_inputs), request.random_seed
        )
        failures = [api.CheckFailure(name, problem) for name, problem in sorted(problems.items())]
        return api.CheckResponse(inputs=wire_map(inputs), failures=failures)

    async def diff(self, request: api.DiffRequest) -> api.DiffResponse:
        state, inputs = plain_map(request.old_state), plain_map(request.new_inputs)
        resource = self._resource(_type_of(request.urn), state)
        ignored = frozenset(path.replace("[", ".").split(".")[0] for path in request.ignore_changes)
        changes = resource.diff(state, inputs, ignored, self._default_tags)
        replaces = sorted(name for name, kind in changes.items() if kind.name.endswith("REPLACE"))
        return api.DiffResponse(
            changes=bool(changes),
            replaces=replaces,
            diffs=sorted(changes),
            detailed_diff={name: api.PropertyDiff(kind, name in inputs) for name, kind in changes.items()},
            delete_before_replace=bool(replaces) and resource.deleted_before_replaced(state, inputs),
        )

    async def create(self, request: api.CreateRequest) -> api.CreateResponse:
        inputs = plain_map(request.properties)
        resource = self._resource(_type_of(request.urn), inputs)
        if request.preview:
            outputs = declared.resource(resource.urn_type).outputs | resource.computed
            unknown = dict.fromkeys(outputs, UNKNOWN)
            return api.CreateResponse(properties=wire_map(unknown | self._with_tags(resource, inputs)))
        resource_id, state = await asyncio.to_thread(self._create, resource, inputs)
        return api.CreateResponse(resource_id, wire_map(state))

    def _create(self, resource: Resource, inputs: Plain) -> tuple[str, Plain]:
        inputs = self._with_tags(
            resource, inputs if resource.auto_name is None else resource.auto_name.complete(inputs)
        )
        resource_id = resource.create(inputs)
        try:
            resource.complete(resource_id, inputs)
            return resource_id, self._present(resource, resource_id, inputs)
        except (ClientError, BotoCoreError, RefusedError) as problem:
            try:
                state = self._present(resource, resource_id, inputs)
            except (ClientError, BotoCoreError, RefusedError):
                state = inputs
            raise PartlyMadeError(resource_id, state, _message(problem)) from problem

    async def read(self, request: api.ReadRequest) -> api.ReadResponse:
        old, old_inputs = plain_map(request.properties), plain_map(request.inputs)
        resource = self._resource(_type_of(request.urn), old)
        resource_id = request.resource_id if old else resource.import_id(request.resource_id)
        try:
            state = await asyncio.to_thread(self._present, resource, resource_id, old or old_inputs)
        except RefusedError:
            return api.ReadResponse()
        # An import, too, begins with the inputs that the state implies.
        names = old_inputs.keys() if old_inputs else resource.accepted()
        inputs = {name: state[name] for name in names if state.get(name)} | {
            name: value for name, value in old_inputs.items() if name.startswith("__") or state.get(name) == value
        }
        return api.ReadResponse(resource_id, wire_map(state), wire_map(inputs))

    async def update(self, request: api.UpdateRequest) -> api.UpdateResponse:
        old, inputs = plain_map(request.olds), plain_map(request.news)
        resource = self._resource(_type_of(request.urn), inputs)
        new = self._with_tags(resource, inputs)
        if request.preview:
            return api.UpdateResponse(wire_map(old | new | dict.fromkeys(resource.recomputed, UNKNOWN)))
        changed = frozenset(resource.diff(old, inputs, frozenset(request.ignore_changes), self._default_tags))
        try:
            await asyncio.to_thread(resource.update, request.resource_id, old, new, changed)
            state = await asyncio.to_thread(self._present, resource, request.resource_id, new)
        except (ClientError, BotoCoreError, RefusedError) as problem:
            raise PartlyMadeError(request.resource_id, old, _message(problem)) from problem
        return api.UpdateResponse(wire_map(state))

    async def delete(self, request: api.DeleteRequest) -> None:
        state = plain_map(request.properties)
        resource = self._resource(_type_of(request.urn), state)
        try:
            await asyncio.to_thread(resource.delete, request.resource_id, state)
        except ClientError as problem:
            if not is_absent(problem):
                raise

    async def invoke(self, request: api.InvokeRequest) -> api.InvokeResponse:
        function = self._functions.get(request.tok)
        if function is None:
            return api.InvokeResponse(failures=[api.CheckFailure("", f"the stand-in has no function {request.tok}")])
        try:
            result = await asyncio.to_thread(function, self._session, plain_map(request.args))
        except (ClientError, BotoCoreError, RefusedError) as problem:
            message = f"invoking {request.tok}: {_message(problem)}"
            return api.InvokeResponse(failures=[api.CheckFailure("", message)])
        if strange := result.keys() - declared.result(request.tok):
            raise AssertionError(f"{request.tok} returns no {sorted(strange)}")
        return api.InvokeResponse(wire_map(result))

    @property
    def _default_tags(self) -> Plain:
        tags: Plain = getattr(self._session, "default_tags", {})
        return tags

    def _resource(self, token: str, state: Plain) -> Resource:
        region = state.get("region")
        return self._resources[token](self._session, None if has_unknown(region) else region)

    def _with_tags(self, resource: Resource, inputs: Plain) -> Plain:
        return inputs | {"tagsAll": self._default_tags | inputs.get("tags", {})} if resource.tagged else inputs

    def _present(self, resource: Resource, resource_id: str, old: Plain) -> Plain:
        """The present state. Raises RefusedError when the thing is gone."""
        try:
            found = resource.read(resource_id, old)
        except ClientError as problem:
            if not is_absent(problem):
                raise
            found = None
        if found is None:
            raise RefusedError(f"{resource.urn_type} {resource_id} does not exist")
        dropped = DROPPED.get(resource.urn_type, {})
        echoed = {name: old[name] for name in dropped if name in old and not found.get(name)}
        # What no API tells (forceDestroy, skipDestroy) stays as it was.
        untold = {name: old[name] for name in resource.accepted() - {"tags"} if name in old and name not in found}
        state = untold | found | echoed
        if resource.regional:
            state["region"] = resource.region
        if resource.tagged:
            known = old.get("tags", {})
            hidden = {key for key, value in self._default_tags.items() if state["tagsAll"].get(key) == value}
            state["tags"] = {key: value for key, value in state["tagsAll"].items() if key in known or key not in hidden}
        return state


def _type_of(urn: str) -> str:
    """The resource's own type: a URN also names those of its parents."""
    return urn.rsplit("::", 2)[1].rsplit("$", 1)[-1]


def is_absent(problem: ClientError) -> bool:
    """Whether AWS says that the thing does not exist."""
    code = str(problem.response.get("Error", {}).get("Code", ""))
    return "NotFound" in code or code.startswith("NoSuch") or code == "404"


def _message(problem: Exception) -> str:
    if isinstance(problem, ClientError):
        error = problem.response["Error"]
        return f"operation {problem.operation_name}: api error {error.get('Code')}: {error.get('Message')}"
    return str(problem)


class _Servicer(server.ProviderServicer):
    """The SDK's servicer, whose errors carry tracebacks, with AWS's own messages instead, and with part-made things."""

    async def Check(self, request: Any, context: Any) -> Any:
        return await self._told(super().Check, request, context)

    async def Configure(self, request: Any, context: Any) -> Any:
        return await self._told(super().Configure, request, context)

    async def Create(self, request: Any, context: Any) -> Any:
        return await self._told(super().Create, request, context, "creating ")

    async def Read(self, request: Any, context: Any) -> Any:
        return await self._told(super().Read, request, context, "reading ")

    async def Update(self, request: Any, context: Any) -> Any:
        return await self._told(super().Update, request, context, "updating ")

    async def Delete(self, request: Any, context: Any) -> Any:
        return await self._told(super().Delete, request, context, "deleting ")

    async def _told(self, call: Callable[[Any, Any], Any], request: Any, context: Any, doing: str = "") -> Any:
        try:
            return await call(request, context)
        except Exception as wrapped:
            problem = wrapped.__context__
            if isinstance(problem, PartlyMadeError):
                await context.abort_with_status(_init_failed(problem, request))
            if isinstance(problem, (ClientError, BotoCoreError, RefusedError)):
                subject = f"{doing}{_type_of(request.urn)} ({request.id}): " if getattr(request, "id", "") else doing
                await context.abort(grpc.StatusCode.UNKNOWN, subject + _message(problem))
            raise


class _InitFailed(grpc.Status):  # type: ignore[misc]
    def __init__(self, message: str, details: bytes) -> None:
        self.code = grpc.StatusCode.UNKNOWN
        self.details = message
        self.trailing_metadata = (("grpc-status-details-bin", details),)


def _init_failed(problem: PartlyMadeError, request: Any) -> grpc.Status:
    inputs = request.news if hasattr(request, "news") else request.properties
    detail = provider_pb2.ErrorResourceInitFailed(
        id=problem.resource_id,
        properties=PropertyValue.marshal_map(wire_map(problem.state)),
        reasons=[problem.reason],
        inputs=inputs,
    )
    status = status_pb2.Status(code=grpc.StatusCode.UNKNOWN.value[0], message=problem.reason)
    status.details.add().Pack(detail)
    return _InitFailed(problem.reason, status.SerializeToString())


def serve(version: str, provider: StandInProvider) -> None:
    """Answer the engine until it goes."""
    server.ProviderServicer = _Servicer  # type: ignore[misc]
    server.main(sys.argv[1:], version, provider)
