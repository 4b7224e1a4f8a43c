"""`--engine ray`: the workers are actors of a Ray cluster, one a device, on machines that share the cache folder.

The same task function as everywhere; Ray only decides where it runs. RAY_ADDRESS names a cluster, else one is started
here and ended with the run. A lost actor's task is given again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.events import Events
from dflash_offline.extract.plan import Task
from dflash_offline.extract.pool import Interrupted, Queue, Signals
from dflash_offline.extract.worker import CALIBRATE, Report, failure
from dflash_offline.shards.errors import UsageError


class Worker:
    """A loaded target on one machine; what an actor holds."""

    def __init__(self, config: ExtractConfig, layers: tuple[int, ...], device: str) -> None:
        self._config, self._layers, self._device, self._runner = config, layers, device, None

    def do(self, number: int, task: Task) -> Report:
        """Run one task to its durable end."""
        import torch

        from dflash_offline.extract.runner import start_runner
        from dflash_offline.extract.task import calibrate, run_task

        torch.set_num_threads(1)
        config = self._config
        try:
            runner: Any = self._runner or start_runner(config, self._layers, torch.device(self._device))
            self._runner = runner
            if number == CALIBRATE:
                calibrate(runner, config.cache, task)
                return Report(number=number, kernels=runner.kernels, probe=runner.probe)
            done = run_task(runner, config.cache, number, task).result()
            return Report(number=number, done=done, kernels=runner.kernels, probe=runner.probe)
        except Exception as error:  # as in a process: the parent must hear of it
            return failure(number, error, self._device)


class Workers:
    """As pool.Workers; none is ahead."""

    def __init__(self) -> None:
        self._ours = False

    def __enter__(self) -> "Workers":
        return self

    def begin(self, config: ExtractConfig, layers: tuple[int, ...], devices: Sequence[str]) -> None:
        """Say what they are for. `devices` says how many; on GPUs Ray gives each a GPU of its own."""
        try:
            import ray
        except ImportError:
            raise UsageError("engine is ray, which is not installed; pip install ray") from None
        self._ray: Any = ray
        self._ours = not ray.is_initialized()
        self._given, self._devices = (config, layers), devices

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._ours and self._ray.is_initialized():
            self._ray.shutdown()

    def run(
        self,
        tasks: Sequence[Task],
        numbers: Sequence[int],
        calibrate: bool,
        report: Callable[[Report], None],
        events: Events,
    ) -> dict[int, str]:
        """As pool.Workers.run."""
        ray, gpu = self._ray, self._devices[0].startswith("cuda")
        if self._ours:
            ray.init(log_to_driver=False, include_dashboard=False)
        remote = ray.remote(num_gpus=int(gpu), num_cpus=1, max_restarts=-1)(Worker)
        queue, running = Queue(numbers, calibrate, events), dict[Any, tuple[int, Any]]()
        start = partial(remote.remote, *self._given, "cuda:0" if gpu else "cpu")
        idle = [start() for _ in self._devices[: max(1, len(numbers))]]
        try:
            with Signals() as signals:
                while queue.todo or running:
                    if signals.number:
                        raise Interrupted(signals.number)
                    while queue.todo and idle:
                        number, actor = queue.todo.popleft(), idle.pop()
                        running[actor.do.remote(number, tasks[max(number, 0)])] = number, actor
                        events("given", task=number, worker=str(actor))
                    for ready in ray.wait(list(running), timeout=0.5)[0]:
                        number, actor = running.pop(ready)
                        try:
                            message: Report = ray.get(ready)
                        except ray.exceptions.RayError as error:
                            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                            message = Report(number=number, error=text)
                        if message.error and gpu:
                            # After an error of its own a device may fail at everything until a new process opens it.
                            ray.kill(actor)
                            actor = start()
                        idle.append(actor)
                        queue.settle(message, report)
        finally:
            for actor in [*idle, *(actor for _, actor in running.values())]:
                ray.kill(actor)
        return queue.failed
