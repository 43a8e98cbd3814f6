"""A connector between servers that prefill and servers that decode, in virtual time.

vLLM loads it by this module's name. It stands for both sides of a disaggregated prefill. The consumer's requests come
with prompt tokens that another server has computed: those behind the local prefix are loaded while the request is
parked, one request after the other over one link. The producer's requests hold their blocks after their end until
another server has fetched them, which `fetched_us` says. The scheduler is vLLM's.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class Loads(KVConnectorMetadata):
    """The loads that begin with a step: request, and blocks; and who holds blocks since the one before, until when."""

    def __init__(self, loads: list[tuple[str, int]], held: dict[str, int]) -> None:
        self.loads, self.held = loads, held


class RemoteConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side; the worker's is `Remote`."""

    def __init__(self, config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, role, kv_cache_config)
        self.block_size = config.cache_config.block_size
        self.loaded: set[str] = set()
        self.loads: list[tuple[str, int]] = []
        self.held: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = (
            0 if request.request_id in self.loaded else (request.kv_transfer_params or {}).get("external_tokens", 0)
        )
        return max(tokens - num_computed_tokens, 0), tokens > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.loaded.add(request.request_id)
        if num_external_tokens > 0:
            tokens = request.kv_transfer_params["external_tokens"]
            cached = (tokens - num_external_tokens) // self.block_size
            self.loads.append((request.request_id, -(-tokens // self.block_size) - cached))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        begun = Loads(self.loads, self.held)
        self.loads, self.held = [], {}
        return begun

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """As NIXL's: a request that was given up, or holds nothing, is not waited for."""
        fetched_us = (request.kv_transfer_params or {}).get("fetched_us", -1)
        holds = fetched_us >= 0 and request.status.name == "FINISHED_LENGTH_CAPPED" and any(block_ids)
        if holds:
            self.held[request.request_id] = fetched_us
        return holds, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The worker's side is `Remote`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


class Remote:
    """The worker's side: a link that takes a fixed time and a time for each block."""

    def __init__(self, times_us: list[int]) -> None:
        self.fixed_us, self.block_us = times_us
        self.under_way: list[tuple[int, str]] = []
        self.held: dict[str, int] = {}
        self.free_us = self.now_us = 0

    def before(self, output: Any, now_us: int, gpu_us: int) -> int:
        """A step's loads begin when it is launched."""
        self.now_us = now_us
        for rid, blocks in output.kv_connector_metadata.loads:
            self.free_us = max(self.free_us, now_us) + self.fixed_us + self.block_us * blocks
            self.under_way.append((self.free_us, rid))
        self.held |= output.kv_connector_metadata.held
        return now_us

    def after(self, output: Any, gpu_us: int) -> Any:
        """What the worker reports: loads that had ended when the step was launched, and blocks fetched by then."""
        from vllm.v1.outputs import KVConnectorOutput

        done = {rid for end_us, rid in self.under_way if end_us <= self.now_us}
        self.under_way = [load for load in self.under_way if load[0] > self.now_us]
        # In their order; vLLM's own is that of a set of texts.
        fetched = {rid: None for rid, end_us in self.held.items() if end_us <= self.now_us}
        self.held = {rid: end_us for rid, end_us in self.held.items() if rid not in fetched}
        return KVConnectorOutput(finished_recving=done, finished_sending=fetched)
