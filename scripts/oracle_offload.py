"""vLLM's native offload of KV blocks to CPU memory in virtual time: its own connector, over copies that only take time.

Scheduler and connector are vLLM's. What is imitated is how the model runner calls the connector in each step, and the
two copy engines: each does one transfer after the other, none before the GPU is done with what was launched before it.
"""

from collections import deque
from typing import Any

# What vLLM's engine loop sleeps after a turn without a batch, while there is still something to wait for.
EMPTY_TURN_US = 1_000


def transfer_config(args: dict[str, Any]) -> Any:
    """vLLM's settings of an offload to `kv_offloading[0]` blocks of CPU memory; None without one."""
    if not args.get("kv_offloading"):
        return None
    import mmap

    from vllm.config import KVTransferConfig

    if args["kv_offloading"][0] == 0:  # what is loaded comes from another server
        return KVTransferConfig(
            kv_connector="RemoteConnector", kv_connector_module_path="oracle_remote", kv_role="kv_consumer"
        )
    page = 2 * 4 * 16 * 2 * args["block_size"]  # keys and values, heads, their size, two bytes
    size = -(-page // mmap.PAGESIZE) * mmap.PAGESIZE * args["kv_offloading"][0]
    return KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config={"cpu_bytes_to_use": size}
    )


class InOrder(dict[str, None]):
    """A set of requests in the order in which they came; vLLM's own is that of a set of texts."""

    def add(self, rid: str) -> None:
        self[rid] = None


class Copies:
    """Both directions of copies; stands for vLLM's CPUOffloadingWorker."""

    def __init__(self, times_us: list[int]) -> None:
        load, load_block, store, store_block = times_us
        self.times_us = {"load": (load, load_block), "store": (store, store_block)}
        self.free_us = dict.fromkeys(self.times_us, 0)
        self.under_way: dict[str, deque[tuple[int, int]]] = {way: deque() for way in self.times_us}
        self.now_us = self.gpu_us = 0

    def _submit(self, way: str, job: int, blocks: int) -> bool:
        fixed, each = self.times_us[way]
        start = max(self.now_us, self.gpu_us, self.free_us[way])
        self.free_us[way] = start + fixed + each * blocks
        self.under_way[way].append((job, self.free_us[way]))
        return True

    def submit_store(self, job: int, source: Any, _: Any) -> bool:
        return self._submit("store", job, len(source.block_ids))

    def submit_load(self, job: int, _: Any, target: Any) -> bool:
        return self._submit("load", job, len(target.block_ids))

    def get_finished(self) -> list[Any]:
        from vllm.v1.kv_offload.base import TransferResult

        done = []
        for jobs in self.under_way.values():
            while jobs and jobs[0][1] <= self.now_us:
                done.append(TransferResult(job_id=jobs.popleft()[0], success=True))
        return done

    def wait(self, flushed: Any) -> None:
        for jobs in self.under_way.values():
            for job, end_us in jobs:
                self.now_us = max(self.now_us, end_us) if job in flushed else self.now_us


class Offload:
    """The worker's side of the connector of an engine core."""

    def __init__(self, core: Any, times_us: list[int]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

        scheduler = core.scheduler
        self.connector = OffloadingConnector(core.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config)
        self.copies = self.connector.connector_worker.worker = Copies(times_us)
        after, build = scheduler._update_after_schedule, scheduler.connector.build_connector_meta

        def note_finished_in_order(output: Any) -> None:
            after(output)
            scheduler.finished_req_ids = InOrder()

        def build_meta(output: Any) -> Any:
            meta = build(output)
            meta.jobs_to_flush = sorted(meta.jobs_to_flush)
            return meta

        scheduler._update_after_schedule = note_finished_in_order
        scheduler.finished_req_ids = InOrder()
        scheduler.connector.build_connector_meta = build_meta

    def before(self, output: Any, now_us: int, gpu_us: int) -> int:
        """What the worker does before a step's forward pass; when it launches it."""
        copies = self.copies
        copies.now_us, copies.gpu_us = max(now_us, copies.now_us), gpu_us
        self.connector.handle_preemptions(output.kv_connector_metadata)
        return copies.now_us

    def after(self, output: Any, gpu_us: int) -> Any:
        """What it does once the pass is launched, which the GPU ends at `gpu_us`: what it reports to the scheduler."""
        from vllm.v1.outputs import KVConnectorOutput

        self.copies.gpu_us = gpu_us
        connector = self.connector
        connector.bind_connector_metadata(output.kv_connector_metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        sending, receiving = connector.get_finished(set(output.finished_req_ids))
        report = KVConnectorOutput(finished_sending=sending, finished_recving=receiving)
        report.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return report
