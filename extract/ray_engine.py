"""`--engine ray`: the workers are actors of a Ray cluster, one a device, on machines that share the cache folder.

The same task function as everywhere; Ray only decides where it runs. RAY_ADDRESS names a cluster, else one is started
here and ended with the run. A lost actor's task is given again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dflash_offline.extract.events import Events
from dflash_offline.extract.pool import CALIBRATE, Interrupted, Job, Queue, Report, Signals, failure
from dflash_offline.shards.errors import UsageError


class Worker:
    """A loaded target on one machine; what an actor holds."""

    def __init__(self, job: Job, device: str) -> None:
        self._job, self._device, self._runner = job, device, None

    def do(self, number: int) -> Report:
        """Run one task to its durable end."""
        import torch

        from dflash_offline.extract.runner import start_runner
        from dflash_offline.extract.task import calibrate, run_task

        torch.set_num_threads(1)
        job = self._job
        try:
            runner: Any = self._runner or start_runner(job.config, job.layers, torch.device(self._device))
            self._runner = runner
            if number == CALIBRATE:
                calibrate(runner, job.cache, job.plan.tasks[0])
                return Report(number=number, kernels=runner.kernels, probe=runner.probe)
            done = run_task(runner, job.cache, number, job.plan.tasks[number]).result()
            return Report(number=number, done=done, kernels=runner.kernels, probe=runner.probe)
        except Exception as error:  # as in a process: the parent must hear of it
            return failure(number, error, self._device)


def run(
    job: Job,
    devices: Sequence[str],
    numbers: Sequence[int],
    calibrate: bool,
    report: Callable[[Report], None],
    events: Events,
) -> dict[int, str]:
    """As pool.run. `devices` says how many actors; on GPUs Ray gives each a GPU of its own."""
    try:
        import ray
    except ImportError:
        raise UsageError("engine is ray, which is not installed; pip install ray") from None
    gpu = devices[0].startswith("cuda")
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False)
    remote: Any = ray.remote(num_gpus=int(gpu), num_cpus=1, max_restarts=-1)(Worker)
    queue, running = Queue(numbers, calibrate, events), dict[Any, tuple[int, Any]]()
    start = partial(remote.remote, job, "cuda:0" if gpu else "cpu")
    idle = [start() for _ in devices[: max(1, len(numbers))]]
    try:
        with Signals() as signals:
            while queue.todo or running:
                if signals.number:
                    raise Interrupted(signals.number)
                while queue.todo and idle:
                    number, actor = queue.todo.popleft(), idle.pop()
                    running[actor.do.remote(number)] = number, actor
                    events("given", task=number, worker=str(actor))
                for ready in ray.wait(list(running), timeout=0.5)[0]:
                    number, actor = running.pop(ready)
                    try:
                        message: Report = ray.get(ready)
                    except ray.exceptions.RayError as error:
                        message = Report(number=number, error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
                    if message.error and gpu:
                        # After an error of its own a device may fail at everything until a new process opens it.
                        ray.kill(actor)
                        actor = start()
                    idle.append(actor)
                    queue.settle(message, report)
    finally:
        for actor in [*idle, *(actor for _, actor in running.values())]:
            ray.kill(actor)
        if ours:
            ray.shutdown()
    return queue.failed
