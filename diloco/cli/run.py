"""`run`: train one model by N replicas."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.cli.app import app
from diloco.cli.options import (
    Backend,
    BackendOption,
    ContextOption,
    InstanceTypeOption,
    JsonOption,
    KeepAliveOption,
    KubeconfigOption,
    MaxCostOption,
    ModelRanks,
    NamespaceOption,
    OutputsOption,
    PricesOption,
    SpotOption,
    StackOption,
    TakeoverOption,
    WorkloadKind,
    WorkloadOption,
    pairs,
    seconds,
    types,
)
from diloco.errors import ConfigurationError


class Policy(StrEnum):
    """What a round does about a straggler."""

    strict = "strict"
    skip = "skip"


class Codec(StrEnum):
    """Wire format of pseudo-gradients."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"


class Reduce(StrEnum):
    """Who averages what."""

    auto = "auto"
    gather = "gather"
    shard = "shard"


@app.command()
def run(
    replicas: Annotated[int, typer.Option(help="Independent replicas of the model.")],
    steps: Annotated[int, typer.Option(help="Inner steps of each replica.")],
    sync_every: Annotated[int, typer.Option(help="Inner steps between two synchronisations of a parameter.")],
    local: Annotated[bool, typer.Option("--local", help="Run the replicas as processes of this machine.")] = False,
    fragments: Annotated[int, typer.Option(help="Parts of the model that are synchronised in turn.")] = 1,
    sync_delay: Annotated[int, typer.Option(help="Inner steps that an exchange may overlap with.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(help="tiny, small, a Hugging Face name, or a folder.  [default: tiny]", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="stdlib, a path or glob, or a data set's name.  [default: stdlib]", show_default=False),
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(help="Parent of the run, s3://… or file://…; without it an S3 is started here.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Parent of the trained model, instead of the run's own prefix.")
    ] = None,
    policy: Annotated[
        Policy, typer.Option(help="strict: every round needs all; skip: stragglers are left out.")
    ] = Policy.strict,
    min_replicas: Annotated[
        int | None,
        typer.Option(help="Replicas that a round needs under skip.  [default: a majority]", show_default=False),
    ] = None,
    codec: Annotated[Codec, typer.Option(help="Wire format of pseudo-gradients.")] = Codec.fp32,
    reduce: Annotated[
        Reduce,
        typer.Option(help="gather: each replica averages all payloads; shard: a part of them; auto: what is faster."),
    ] = Reduce.auto,
    mean_codec: Annotated[Codec, typer.Option(help="Wire format of the means of --reduce shard.")] = Codec.fp32,
    timeout: Annotated[
        float, typer.Option(help="Seconds until a round that is not committed ends a replica.")
    ] = 1800.0,
    grace: Annotated[
        float | None,
        typer.Option(
            help="Seconds that skip waits for stragglers.  [default: by the ranks' recent arrivals]", show_default=False
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Rounds between two checkpoints.")] = 10,
    max_restarts: Annotated[int, typer.Option(help="Relaunches of each rank whose process died; 0: none.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the model's first state and of the order of data.")] = 0,
    run_id: Annotated[str | None, typer.Option(help="Name of the run; the same name resumes it.")] = None,
    takeover: TakeoverOption = False,
    trainer_module: Annotated[str, typer.Option(help="Module of the trainer.")] = "diloco.training",
    trainer_fn: Annotated[str, typer.Option(help="Function of the trainer.")] = "diloco_train",
    trainer_kwargs_json: Annotated[str, typer.Option(help="More arguments of the trainer, a JSON object.")] = "{}",
    endpoint_url: Annotated[str | None, typer.Option(help="Endpoint of an S3 that is not Amazon's.")] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also train one process by plain data parallelism.")
    ] = False,
    as_json: JsonOption = False,
    stack: StackOption = None,
    outputs: OutputsOption = None,
    instance_type: InstanceTypeOption = None,
    spot: SpotOption = False,
    max_runtime: Annotated[
        int, typer.Option(parser=seconds, metavar="TIME", help="Longest time of a job: 12h.", show_default="1d")
    ] = 86_400,
    max_wait: Annotated[
        int | None,
        typer.Option(parser=seconds, metavar="TIME", help="Spot: running and waiting.  [default: a day more]"),
    ] = None,
    keep_alive: KeepAliveOption = 0,
    volume_gb: Annotated[int, typer.Option(help="Disk of an instance that has none of its own.")] = 50,
    max_cost: MaxCostOption = None,
    prices: PricesOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start the jobs and leave them alone.")] = False,
    hf_token_secret: Annotated[
        str | None,
        typer.Option(
            metavar="ARN|NAME",
            help="Secret with a Hugging Face token: an ARN of Secrets Manager; kubernetes: a Secret with key HF_TOKEN.",
        ),
    ] = None,
    model_from: Annotated[
        ModelRanks, typer.Option(help="Ranks whose job's output holds the trained model.")
    ] = ModelRanks.rank0,
    uses_all_gpus: Annotated[
        bool, typer.Option("--uses-all-gpus", help="The trainer is one's own and uses every GPU of its instance.")
    ] = False,
    backend: BackendOption = Backend.sagemaker,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    image: Annotated[str | None, typer.Option(help="kubernetes: the image.  [default: the stack's]")] = None,
    service_account: Annotated[
        str | None, typer.Option(help="kubernetes: as whom pods run.  [default: the stack's, else default]")
    ] = None,
    credentials_secret: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="kubernetes: Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, where pods have no role.",
        ),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="kubernetes: Kueue's LocalQueue, or Volcano's Queue.")] = None,
    workload: WorkloadOption = WorkloadKind.job,
    cpu: Annotated[str, typer.Option(help="kubernetes: CPUs of a replica.")] = "1",
    memory: Annotated[str, typer.Option(help="kubernetes: memory of a replica.")] = "4Gi",
    shared_memory: Annotated[str, typer.Option(help="kubernetes: its part that is /dev/shm.")] = "1Gi",
    gpus: Annotated[int, typer.Option(help="kubernetes: NVIDIA GPUs of a replica.")] = 0,
    node_selector: Annotated[
        list[str] | None, typer.Option(metavar="LABEL=VALUE", help="kubernetes: only such nodes; may be repeated.")
    ] = None,
    priority_class: Annotated[str | None, typer.Option(help="kubernetes: the pods' PriorityClass.")] = None,
    region: Annotated[str | None, typer.Option(help="kubernetes: the bucket's region.  [default: the stack's]")] = None,
) -> None:
    """Train one model by N replicas: on this machine (--local), as SageMaker jobs (--stack or --outputs), or as pods of
    a cluster (--backend kubernetes).
    """
    on_cluster = backend is Backend.kubernetes
    remote = stack is not None or outputs is not None or on_cluster
    if local == remote:
        raise ConfigurationError(
            "say where the replicas run: --local for this machine, --stack NAME or --outputs FILE for SageMaker, or"
            " --backend kubernetes"
        )
    from diloco.embedded import BUCKET
    from diloco.spec import RunSettings, new_run_id

    if endpoint_url is not None and not endpoint_url.startswith(("http://", "https://")):
        raise ConfigurationError(f"--endpoint-url {endpoint_url}: begin it with http:// or https://")
    found = None
    if remote:
        from diloco.stack import read_outputs

        found = None if stack is None and outputs is None else read_outputs(outputs, stack)
        _refuse_local_options(
            rendezvous=None if found is None else rendezvous,
            endpoint_url=None if on_cluster else endpoint_url,
            baseline=baseline,
        )
        rendezvous = rendezvous if found is None else found.rendezvous_uri
        if rendezvous is None:
            raise ConfigurationError("--rendezvous s3://bucket/prefix is needed without --stack or --outputs")
    settings = RunSettings.checked(
        replicas=replicas,
        steps=steps,
        sync_every=sync_every,
        fragments=fragments,
        sync_delay=sync_delay,
        seed=seed,
        run_id=new_run_id() if run_id is None else run_id,
        rendezvous=f"s3://{BUCKET}" if rendezvous is None else _parent("--rendezvous", rendezvous),
        output=None if output is None else _parent("--output", output),
        trainer_module=trainer_module,
        trainer_fn=trainer_fn,
        trainer_kwargs=_trainer_kwargs(trainer_module, trainer_kwargs_json, model=model, data=data),
        max_restarts=max_restarts,
        exchange={
            "policy": policy.value,
            "min_replicas": min_replicas,
            "codec": codec.value,
            "reduce": reduce.value,
            "mean_codec": mean_codec.value,
            "timeout": timeout,
            "grace": grace,
            "checkpoint_every": checkpoint_every,
        },
    )
    if on_cluster:
        from diloco.cli.kubernetes import launch_on_cluster

        raise typer.Exit(
            launch_on_cluster(
                settings,
                found,
                namespace=namespace,
                kubeconfig=kubeconfig,
                context=context,
                takeover=takeover,
                detach=detach,
                as_json=as_json,
                image_uri=image,
                service_account=service_account,
                region=region,
                cpu=cpu,
                memory=memory,
                shared_memory=shared_memory,
                gpus=gpus,
                retries=max_restarts,
                max_runtime=max_runtime,
                queue=queue,
                priority_class=priority_class,
                node_selector=pairs("--node-selector", node_selector),
                credentials_secret=credentials_secret,
                token_secret=hf_token_secret,
                endpoint_url=endpoint_url,
                workload=workload.value,
            )
        )
    if found is not None:
        from diloco.cli.sagemaker import SageMakerLaunch
        from diloco.sagemaker_run import data_uri, job_settings

        jobs = job_settings(
            found,
            settings.run_id,
            instance_types=types(instance_type),
            spot=spot,
            max_runtime=max_runtime,
            max_wait=max_wait,
            keep_alive=keep_alive,
            volume_gb=volume_gb,
            stack=stack,
            data_uri=data_uri(settings),
            token_secret_arn=hf_token_secret,
            model=model_from.value,
            uses_all_gpus=uses_all_gpus and not settings.default_trainer,
        )
        remote_launch = SageMakerLaunch(
            found, settings, jobs, prices=prices, max_cost=max_cost, takeover=takeover, as_json=as_json
        )
        raise typer.Exit(remote_launch.detach() if detach else remote_launch.run())
    from diloco.cli.local import LocalLaunch

    if baseline and not settings.default_trainer:
        raise ConfigurationError("--baseline knows only the default trainer: leave out --baseline or --trainer-module")
    launch = LocalLaunch(
        settings,
        embedded=rendezvous is None,
        endpoint_url=endpoint_url,
        takeover=takeover,
        baseline=baseline,
        as_json=as_json,
    )
    raise typer.Exit(launch.run())


def _refuse_local_options(*, rendezvous: str | None, endpoint_url: str | None, baseline: bool) -> None:
    """Raise ConfigurationError for options that a stack's outputs decide."""
    given = [
        name
        for name, value in (
            ("--rendezvous", rendezvous),
            ("--endpoint-url", endpoint_url),
            ("--baseline", baseline or None),
        )
        if value is not None
    ]
    if given:
        raise ConfigurationError(f"{', '.join(given)} goes with --local: the stack's outputs say where runs are")


def _parent(option: str, uri: str) -> str:
    """Return the URI if replicas, which are other processes, can use it."""
    if uri.startswith("memory:"):
        raise ConfigurationError(
            f"{option} {uri}: replicas are processes and can't share memory; use s3://bucket/prefix or file:///folder"
        )
    scheme, separator, rest = uri.partition("://")
    if separator and scheme not in ("s3", "file"):
        raise ConfigurationError(
            f"{option} {uri}: {scheme}:// is no store of runs: use s3://bucket/prefix or file:///folder"
        )
    if separator and not rest.strip("/"):
        raise ConfigurationError(f"{option} {uri} names no {'bucket' if scheme == 's3' else 'folder'}: add it")
    if not separator:
        raise ConfigurationError(
            f"{option} {uri} has no scheme: use s3://bucket/prefix or {Path(uri).absolute().as_uri()}"
        )
    return uri


def _trainer_kwargs(module: str, text: str, **options: str | None) -> dict[str, Any]:
    """Merge `--trainer-kwargs-json` with the options that belong to the default trainer."""
    from diloco.spec import DEFAULT_TRAINER

    try:
        parsed = json.loads(text)
    except ValueError as problem:
        raise ConfigurationError(f"--trainer-kwargs-json is not JSON ({problem}): write '{{\"name\": 1}}'") from None
    if not isinstance(parsed, dict):
        raise ConfigurationError("--trainer-kwargs-json must be a JSON object: write '{\"name\": 1}'")
    kwargs: dict[str, Any] = parsed
    for name, value in options.items():
        if value is None:
            continue
        if module != DEFAULT_TRAINER[0]:
            raise ConfigurationError(f"--{name} belongs to the default trainer: put {name} into --trainer-kwargs-json")
        if name in kwargs:
            raise ConfigurationError(f"{name} is given twice: by --{name} and in --trainer-kwargs-json; leave one out")
        kwargs[name] = value
    if module == DEFAULT_TRAINER[0]:
        kwargs = {"model": "tiny", "data": "stdlib"} | kwargs
    return kwargs
