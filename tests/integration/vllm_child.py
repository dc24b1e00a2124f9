"""vLLM engines in separate processes, each controlled by JSON lines on a socket.

Importing vLLM takes three times as long as starting an engine with a tiny model. Therefore one process imports it,
and each engine is a fork of that process. Output of vLLM goes to the engine's log.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests.integration import cpu_models, forking, vision, vllm_worker_calls

if TYPE_CHECKING:
    from PIL import Image

_IMPORTS = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "lmcache_async.engine.engine",
    "lmcache_async.integration.vllm.connector",
)
# The models of most tests; the module of any other model is imported by the engine that uses it.
_MODELS = ("deepseek_v2", "gemma3", "llama", "mistral", "qwen3_next")
_IMAGE_MODELS = ("qwen2_5_vl",)


class Child:
    """Operations of an engine: its public methods."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if options.get("async_scheduling"):
            _allow_asynchronous_scheduling()
        if options.get("attention_backend") == "CPU_MLA" and "enable_prefix_caching" in options:
            cpu_models.continue_mla_prefills()
        sys.path += options.pop("path", [])
        transfer = options.pop("kv_transfer_config", None)
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        _load_model_class(Path(options["model"]))
        defaults = {"enable_prefix_caching": True, "disable_log_stats": False, "seed": 0}
        self._llm = LLM(**(defaults | options))
        self._engine: Any = self._llm.llm_engine
        self._answers: dict[str, dict[str, Any]] = {}
        self._begun: dict[str, float] = {}
        self._adapters: dict[str, int] = {}

    def add(self, requests: list[dict[str, Any]]) -> None:
        """Add requests to vLLM."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        for request in requests:
            prompt: Any = {"prompt_token_ids": request["prompt"]}
            media: dict[str, list[Any]] = {}
            if request["images"]:
                media["image"] = [_image(image) for image in request["images"]]
                prompt["multi_modal_uuids"] = {"image": [image["uuid"] for image in request["images"]]}
            if request["videos"]:
                media["video"] = [_video(video) for video in request["videos"]]
            if media:
                prompt["multi_modal_data"] = media
            if request["processor"]:
                prompt["mm_processor_kwargs"] = request["processor"]
            if request["cache_salt"]:
                prompt["cache_salt"] = request["cache_salt"]
            params = request["params"]
            sampling = SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                logprobs=5,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            adapter = None
            if request["adapter"]:
                number = self._adapters.setdefault(request["adapter"], len(self._adapters) + 1)
                adapter = LoRARequest(
                    Path(request["adapter"]).name,
                    number,
                    request["adapter"],
                    load_inplace=request["reloads"],
                )
            self._begun[request["name"]] = time.monotonic()
            self._engine.add_request(request["name"], prompt, sampling, lora_request=adapter)

    def step(self) -> None:
        """Step once. An engine core in a separate process steps by itself, and has no output without requests."""
        in_process = hasattr(self._engine.engine_core, "engine_core")
        if not in_process and not self._engine.has_unfinished_requests():
            return
        for output in self._engine.step():
            if output.finished:
                seconds = time.monotonic() - self._begun.pop(output.request_id)
                self._answers[output.request_id] = _answer(output) | {"seconds": seconds}

    def run(self) -> None:
        """Step until no request is left."""
        while self._engine.has_unfinished_requests():
            self.step()

    def take(self, name: str) -> dict[str, Any]:
        """Return the answer of a finished request."""
        return self._answers.pop(name)

    def embed(self, prompt: list[int]) -> list[float]:
        """Return the answer of a pooling model."""
        [output] = self._llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        return list(output.outputs.embedding)

    def abort(self, names: list[str]) -> None:
        self._engine.abort_request(names)

    def reset(self, connector: bool) -> bool:
        """Reset vLLM's prefix cache, and ours with `connector`. Return False while a block of it is held."""
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def sleep_and_wake(self) -> None:
        """Sleep and wake up with the weights kept."""
        self._llm.sleep(level=1)
        self._llm.wake_up()

    def counters(self) -> dict[str, float]:
        """Return vLLM's metrics by name."""
        metrics = self._llm.get_metrics()
        return {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}

    def metrics(self) -> str:
        """Return the text of vLLM's route /metrics."""
        from fastapi import FastAPI
        from starlette.testclient import TestClient
        from vllm.entrypoints.serve.instrumentator.metrics import attach_router

        app = FastAPI()
        attach_router(app)
        return TestClient(app).get("/metrics").text

    def call(self, name: str) -> Any:
        """Run a function of `vllm_worker_calls` in every worker, and return what the first one answers."""
        return self.call_all(name)[0]

    def call_all(self, name: str) -> list[Any]:
        """Run a function of `vllm_worker_calls` in every worker."""
        return list(self._llm.collective_rpc(getattr(vllm_worker_calls, name)))

    # Only with the scheduler in this process.

    def free_blocks(self) -> tuple[int, int]:
        """Return the number of free blocks of vLLM's pool, and of all blocks."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1  # vLLM reserves one

    def asks(self) -> bool:
        """Whether our scheduler connector queries the worker connector: connected, and no reset in progress."""
        return bool(self._connector.scheduler.ready)

    def has_work(self) -> bool:
        """Whether vLLM would step by itself."""
        return bool(self._scheduler.has_requests())

    def overlaps(self) -> bool:
        """Whether vLLM schedules a step before the previous one has ended."""
        return self._engine.engine_core.engine_core.batch_queue is not None

    def prefill_rate(self) -> float:
        """Return the measured prompt tokens per second of our scheduler connector; 0 if unknown."""
        prefill = self._connector.scheduler.load_policy.prefill
        return 1000 / prefill.seconds(1000) if prefill.known else 0.0

    def state(self, name: str) -> str:
        """Return vLLM's status of the request, or an empty string if it is finished."""
        for request in self._scheduler.requests.values():
            if request.request_id.startswith(name):
                return str(request.status.name)
        return ""

    def run_watched(self) -> list[str]:
        """Step until no request is left, and return the names of the preempted requests."""
        preempted: set[str] = set()
        while self._engine.has_unfinished_requests():
            self.step()
            for request in self._scheduler.requests.values():
                if request.num_preemptions:
                    preempted.add(request.request_id.partition("-")[0])
        return sorted(preempted)

    # Shutdown.

    def shut_down(self) -> None:
        """Shut down as vLLM does at process exit."""
        self._engine.engine_core.shutdown()

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    @property
    def _connector(self) -> Any:
        return vllm_worker_calls.own_connector(self._scheduler.connector)


def _answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "cached_tokens": output.num_cached_tokens or 0,
        "kv_transfer_params": output.kv_transfer_params,
        "finish_reason": completion.finish_reason,
        "tokens": list(completion.token_ids),
        "logprobs": [{str(t): p.logprob for t, p in place.items()} for place in completion.logprobs or []],
    }


def _image(image: dict[str, Any]) -> Image.Image:
    """Return noise that scaling does not remove."""
    from PIL import Image

    return Image.fromarray(_noise(image["seed"], image["side"], image["side"]))


def _video(video: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return frames of noise and their description."""
    count = video["frames"]
    frames = _noise(video["seed"], count, video["height"], video["width"])
    return frames, {
        "fps": video["fps"],
        "duration": count / video["fps"],
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def _noise(seed: int, *shape: int) -> Any:
    import numpy as np

    return np.random.default_rng(seed).integers(0, 256, (*shape, 3)).astype(np.uint8)


def serve(channel: socket.socket) -> None:
    """Answer requests until the end of the input.

    The first line has the options of an engine, or a module and its arguments to run like `python -m`.
    """
    with channel.makefile("rw", encoding="utf-8") as stream:

        def answer(value: Any) -> None:
            stream.write(json.dumps(value) + "\n")
            stream.flush()

        options = json.loads(stream.readline())
        if "module" in options:
            sys.argv[1:] = options["arguments"]
            runpy.run_module(options["module"], run_name="__main__", alter_sys=True)
            answer(None)
            return
        child = Child(options)
        answer(None)
        for line in stream:
            request = json.loads(line)
            operation = request.pop("do")
            answer(getattr(child, operation)(**request))


def engine_process(channel: socket.socket, log: int, environment: dict[str, str]) -> NoReturn:
    """Run an engine in a forked process, and end the process."""
    os.setsid()  # its children are killed with it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    try:
        serve(channel)
    except BaseException:  # noqa: BLE001 - the end of the process
        traceback.print_exc()
        channel.close()
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # a regular interpreter exit takes seconds with vLLM loaded


def _allow_asynchronous_scheduling() -> None:
    """Allow asynchronous scheduling, which vLLM's CPU platform turns off although its workers support it."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_otherwise(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_otherwise)


def _replace_gloo_for_one_rank() -> None:
    """Use torch's backend `fake`, which has no threads, for process groups of one rank.

    vLLM creates a dozen of these groups per process. With gloo, each has a thread that polls a hundred times per
    second, and the idle engines of a test run take an eighth of two cores.
    """
    import torch.distributed
    import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

    new_group = torch.distributed.new_group

    def formed(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        if ranks is not None and len(ranks) == 1:
            options["backend"] = "fake"
        return new_group(ranks, *arguments, **options)

    torch.distributed.new_group = formed


def _register_kernels() -> None:
    """Replace Triton's kernels before the fork. vLLM searches all modules for them, which is a quarter of a start."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):  # not in vLLM 0.30
        current_platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = classmethod(lambda _: None)


def _load_model_class(model: Path) -> None:
    """Register the model's class instead of its name, which vLLM would inspect in another process."""
    from vllm import ModelRegistry

    [architecture] = json.loads((model / "config.json").read_text())["architectures"]
    if architecture == "KimiLinearForCausalLM":
        cpu_models.replace_operations_of_kimi_linear()
    registered = ModelRegistry.models[architecture]
    if hasattr(registered, "module_name"):
        ModelRegistry.register_model(architecture, registered.load_model_cls())


def _remember_model(architecture: str) -> None:
    """Make vLLM inspect a model's class here, and keep the result in its cache for the servers that tests start.

    Otherwise each server starts another process for it, which imports vLLM.
    """
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    in_a_process = registry._run_in_subprocess
    registry._run_in_subprocess = lambda look: look()
    registry.ModelRegistry.models[architecture].inspect_model_cls()
    registry._run_in_subprocess = in_a_process


def main() -> None:
    """Fork an engine for each message, which has the engine's channel and log."""
    calls = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # while vLLM is imported
    forking.fork_instead_of_spawn()
    images = vision.prepare()
    models = _MODELS + (_IMAGE_MODELS if images else ())
    for name in (*_IMPORTS, *(f"vllm.model_executor.models.{model}" for model in models)):
        importlib.import_module(name)
    worker: Any = importlib.import_module("lmcache_async.integration.vllm.worker")
    worker.BEGIN_S = 60.0  # the machine may be busy, and these tests need hits
    _remember_model("LlamaForCausalLM")
    cpu_models.replace_operations()
    _replace_gloo_for_one_rank()
    _register_kernels()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exits of the forks need not be collected
    gc.freeze()
    gc.enable()
    calls.sendall(b".")
    while True:
        message, (*files,), _, _ = socket.recv_fds(calls, 1 << 16, 2)
        if not message:
            return
        pid = os.fork()
        if not pid:
            calls.close()
            engine_process(socket.socket(fileno=files[0]), files[1], json.loads(message))
        for file in files:
            os.close(file)
        calls.sendall(pid.to_bytes(4, "little"))


if __name__ == "__main__":
    main()
