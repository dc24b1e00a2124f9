"""vLLM's OffloadingConnector on a CPU, without a CUDA stream.

A `kv_connector_extra_config` selects it with `spec_name` and `spec_module_path`. Lookup, eviction and the choice of
blocks are vLLM's own. The copies of `CPUOffloadingSpecOnCPU` run at once, within the step that starts them. Those of
`CPUOffloadingSpecWithStream` run in order on a thread, as on a stream, and vLLM learns of their end in a later step.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class _Done:
    """A stream and an event whose work has ended."""

    def __init__(self, **_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Done) -> float:
        del end
        return 1.0

    def _nothing(self, *_: Any) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing


class _CopyThread:
    """Runs work in order on a thread that starts with the first one."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._started = False

    def submit(self, work: Callable[[], object]) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, daemon=True).start()
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()


class _Event:
    """An event that is recorded on the copy thread."""

    def __init__(self, thread: _CopyThread) -> None:
        self._thread = thread
        self._reached = threading.Event()
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        del stream
        self._reached.clear()
        self._thread.submit(self._reach)

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    def elapsed_time(self, end: _Event) -> float:
        return (end._at - self._at) * 1e3

    def _reach(self) -> None:
        self._at = time.perf_counter()
        self._reached.set()


class _Replaced:
    """A module with some attributes replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _OnDevice(torch.Tensor):
    is_cuda = property(lambda _: True)  # type: ignore[assignment]


def _copy(sources: list[int], targets: list[int], sizes: list[int]) -> None:
    for source, target, size in zip(sources, targets, sizes, strict=True):
        ctypes.memmove(target, source, size)


def _replace_device(submit: Callable[[Callable[[], object]], object], event: Callable[..., Any]) -> None:
    """Replace CUDA's streams, events and copies in vLLM's worker of this process."""

    def copy(sources: Any, targets: Any, sizes: Any, **_: Any) -> None:
        lists = [each.tolist() for each in (sources, targets, sizes)]
        submit(lambda: _copy(*lists))

    module: Any = gpu_worker
    module.current_platform = _Replaced(
        gpu_worker.current_platform,
        Stream=_Done,
        current_stream=_Done,
        stream=contextlib.nullcontext,
    )
    module.torch = _Replaced(torch, Event=event)
    module.ops = SimpleNamespace(swap_blocks_batch=copy)


class CPUOffloadingSpecOnCPU(CPUOffloadingSpec):
    """The specification without the check for a GPU. Copies run at once."""

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            self._replace_device()
            for each in kv_caches.tensors:
                each.tensor = each.tensor.as_subclass(_OnDevice)
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def _replace_device(self) -> None:
        _replace_device(lambda work: work(), _Done)


class CPUOffloadingSpecWithStream(CPUOffloadingSpecOnCPU):
    """The same with copies on a thread."""

    def _replace_device(self) -> None:
        thread = _CopyThread()
        _replace_device(thread.submit, lambda **_: _Event(thread))
