"""Pages and swapping: nothing is lost, nothing is owned twice, and what comes back is what went out, bit by bit."""

from __future__ import annotations

import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diffusers_continuous.config import ContinuousBatchingConfig
from diffusers_continuous.memory import budget
from diffusers_continuous.memory.block_pool import BlockPool, BlockPoolError, PageLedger, Where
from diffusers_continuous.memory.host_swap import HostSwap, PagedTensors
from diffusers_continuous.memory.row_state import PagedText
from diffusers_continuous.memory.token_limit import CALM_STEPS, TokenLimit
from diffusers_continuous.request import TextEmbeds, in_pages
from diffusers_continuous.scheduler import StepScheduler
from test_scheduler import names, request, run_step

CPU = torch.device("cpu")
PAGE = 64
NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 9


def carry_out(ledger: PageLedger, tensors: dict[int, PagedTensors]) -> None:
    """What a `RowMover` does, for owners that are numbers."""
    for move in ledger.take_moves():
        pages = tensors[move.owner]
        if move.where is Where.NOWHERE:
            pages.leave()
        elif move.where is Where.HOST:
            pages.swap_out(move.blocks)
        elif pages.is_out:
            pages.swap_in(move.blocks)
        else:
            pages.enter(move.blocks)


class Swapping(RuleBasedStateMachine):
    """Owners come, write, go out, come back and are cancelled in any order; a plain dict says what they must hold.

    Pages move some time after the ledger has decided it, many moves in one go, as in the engine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(BlockPool(NUM_BLOCKS), BlockPool(NUM_HOST_BLOCKS))
        self.swap = HostSwap(PAGE, CPU, NUM_BLOCKS, NUM_HOST_BLOCKS)
        self.tensors: dict[int, PagedTensors] = {}
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        self.out: set[int] = set()
        self.blocks: dict[int, int] = {}

    def inside(self) -> list[int]:
        return sorted(set(self.blocks) - self.out)

    @rule(num_blocks=st.integers(1, 5), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def allocate(self, num_blocks: int, dtype: torch.dtype) -> None:
        owner = len(self.tensors)
        self.tensors[owner] = PagedTensors(self.swap)
        first = torch.randn(num_blocks * 8 + 1).to(dtype)  # not a whole number of pages
        self.tensors[owner].put("first", first)
        self.expected[owner] = {"first": first}
        free = NUM_BLOCKS - sum(self.blocks[each] for each in self.inside())
        if num_blocks > free:
            with pytest.raises(BlockPoolError):
                self.ledger.bring_in(owner, num_blocks)
            return
        self.ledger.bring_in(owner, num_blocks)
        self.blocks[owner] = num_blocks

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), size=st.integers(1, 60))
    def write(self, data: st.DataObject, size: int) -> None:
        carry_out(self.ledger, self.tensors)
        owner = data.draw(st.sampled_from(sorted(self.blocks)))
        held, tensor = self.expected[owner], torch.randn(size)
        taken = sum(self.swap.num_blocks_for(each.nbytes) for each in held.values())
        name = f"t{len(held)}"
        if taken + self.swap.num_blocks_for(tensor.nbytes) > self.blocks[owner]:
            with pytest.raises(BlockPoolError):
                self.tensors[owner].put(name, tensor)
            return
        self.tensors[owner].put(name, tensor)
        held[name] = tensor

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        carry_out(self.ledger, self.tensors)
        owner = data.draw(st.sampled_from(sorted(self.blocks)))
        name = data.draw(st.sampled_from(sorted(self.expected[owner])))
        self.expected[owner][name] = torch.randn_like(self.expected[owner][name])
        self.tensors[owner].put(name, self.expected[owner][name])

    @precondition(lambda self: self.inside())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.inside()))
        if self.blocks[owner] > NUM_HOST_BLOCKS - sum(self.blocks[each] for each in self.out):
            with pytest.raises(BlockPoolError):
                self.ledger.send_out(owner)
            return
        self.ledger.send_out(owner)
        self.out.add(owner)

    @precondition(lambda self: self.inside())
    @rule(shortage=st.integers(1, NUM_BLOCKS))
    def make_room(self, shortage: int) -> None:
        room = NUM_HOST_BLOCKS - sum(self.blocks[each] for each in self.out)
        leavers, num_freed = self.ledger.could_leave(self.inside(), shortage)
        assert num_freed == sum(self.blocks[owner] for owner in leavers) <= room
        assert num_freed - self.blocks[leavers[-1]] < shortage if leavers else num_freed == 0
        for owner in leavers:
            self.ledger.send_out(owner)
        self.out.update(leavers)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.out)))
        if self.blocks[owner] > NUM_BLOCKS - sum(self.blocks[each] for each in self.inside()):
            with pytest.raises(BlockPoolError):
                self.ledger.bring_in(owner, self.blocks[owner])
            return
        self.ledger.bring_in(owner, self.blocks[owner])
        self.out.remove(owner)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.blocks)))
        self.ledger.release(owner)
        self.ledger.release(owner)
        del self.blocks[owner]
        self.out.discard(owner)

    @invariant()
    def the_books_add_up(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.device.num_used == sum(self.blocks[owner] for owner in self.inside())
        assert self.ledger.host.num_used == sum(self.blocks[owner] for owner in self.out)

    @rule()
    def everybody_holds_what_it_wrote(self) -> None:
        carry_out(self.ledger, self.tensors)
        for owner, tensors in self.expected.items():
            assert self.tensors[owner].is_out == (owner in self.out)
            for name, tensor in tensors.items():
                got = self.tensors[owner].get(name)
                assert got.dtype == tensor.dtype
                assert torch.equal(got, tensor)

    def teardown(self) -> None:
        self.everybody_holds_what_it_wrote()
        self.ledger.release_all()
        assert self.ledger.usage() == {"num_blocks": NUM_BLOCKS, "num_used_blocks": 0, "num_swapped_out_rows": 0}


TestSwapping = Swapping.TestCase
TestSwapping.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_books_that_do_not_add_up_are_printed():
    pool = BlockPool(4)
    pool.allocate(2, "a")
    pool.allocate(1, "b")
    pool.free("b")
    pool._free.pop()
    with pytest.raises(BlockPoolError, match="'a': 2"):
        pool.check_integrity()


def test_pages_that_were_used_are_used_again_before_others_are_touched():
    pool = BlockPool(10**9)
    assert pool.allocate(3, "a") == (0, 1, 2)
    pool.free("a")
    assert pool.allocate(2, "b") == (0, 1)
    assert pool.allocate(2, "c") == (2, 3)
    pool.check_integrity()


def paged(swap: HostSwap, blocks: tuple[int, ...], **tensors: torch.Tensor) -> PagedTensors:
    pages = PagedTensors(swap)
    for name, tensor in tensors.items():
        pages.put(name, tensor)
    pages.enter(blocks)
    return pages


def test_the_last_tensor_can_give_its_pages_to_another():
    pages = paged(HostSwap(PAGE, CPU, 4, 4), (3, 0, 2), latents=torch.zeros(16), text=torch.zeros(16))
    with pytest.raises(BlockPoolError):
        pages.drop("latents")
    pages.drop("text", "negative_text")
    sample = torch.arange(32.0)
    pages.put("sample", sample)
    assert torch.equal(pages.get("sample"), sample)


def test_tensors_of_many_owners_are_read_at_once_and_only_while_they_are_here():
    swap = HostSwap(PAGE, CPU, 8, 8)
    a, b = torch.randn(3, 8), torch.randn(5, 8)  # two tokens to a page, the last page half full
    tables = [paged(swap, (5, 1), latents=a), paged(swap, (2, 7, 0), latents=b)]
    gather = swap.gather("latents", [tables[1], tables[0], tables[1]])
    assert gather is not None
    assert torch.equal(gather(), torch.cat([b, a, b]))
    tables[0].put("latents", a + 1)
    assert torch.equal(gather(), torch.cat([b, a + 1, b]))
    assert swap.gather("latents", [tables[0], None]) is None
    tables[0].swap_out((0, 1))
    assert swap.gather("latents", tables) is None
    other = paged(swap, (3,), latents=torch.randn(4, 4))
    assert swap.gather("latents", [tables[1], other]) is None


def test_who_has_most_slack_makes_way():
    config = ContinuousBatchingConfig(scheduler_type="edf", max_requests_per_batch=1)
    sched = StepScheduler(config)
    sched.memory = PageLedger(BlockPool(2), BlockPool(2))
    states = {}
    for name, deadline_s in (("a", 50.0), ("b", 40.0), ("c", 1.0)):
        states[name] = request(name, steps=2, deadline_s=deadline_s, output_type="latent")
        states[name].rows[0].num_blocks = 1
        sched.add_request(states[name])
        output = run_step(sched)[0]
        assert names(output.denoise) == [name]
    assert [(*names([move.owner]), move.where) for move in output.moves] == [("a", Where.HOST), ("c", Where.DEVICE)]
    while sched.has_requests():
        output = run_step(sched)[0]
    assert [*names(output.denoise), states["a"].step] == ["a", 2]
    assert sched.memory.usage() == {"num_blocks": 2, "num_used_blocks": 0, "num_swapped_out_rows": 0}


def test_a_pool_on_a_cpu_is_a_part_of_the_machine_and_takes_nothing_before_it_is_used(monkeypatch):
    def work() -> None:
        raise AssertionError("a CPU's memory need not be probed")

    for machine, expected in ((2**30, 2**29), (2**40, budget.CPU_BYTES)):
        monkeypatch.setattr(budget, "memory_info", lambda device, machine=machine: (0, machine))
        assert budget.pool_bytes(CPU, 0.5, work) == expected
    monkeypatch.setattr(budget, "memory_info", lambda device: (0, 2**32))
    assert budget.pool_bytes(CPU, 0.5, work, reserved_bytes=2**30) == 3 * 2**29
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.use_deterministic_algorithms(True)  # which fills new tensors
    try:
        HostSwap(65536, CPU, budget.CPU_BYTES // 65536, 2**16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000  # pages that were touched


def test_a_pool_on_another_device_is_a_part_of_what_the_largest_step_leaves(monkeypatch):
    used = {"now": 100, "free": 2**40}
    module = SimpleNamespace(
        memory_allocated=lambda device: used["now"],
        reset_peak_memory_stats=lambda device: None,
        max_memory_allocated=lambda device: used["now"] + 2**39,
        mem_get_info=lambda device: (used["free"], 2**41),
        empty_cache=lambda: None,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def work() -> None:
        raise RuntimeError("NPU out of memory. Tried to allocate 20.00 GiB")

    device = torch.device("meta")
    assert budget.pool_bytes(device, 0.5, work, reserved_bytes=2**38) == 2**37
    used["free"] = 2**39
    assert budget.pool_bytes(device, 0.5, work) == budget.LEAST_BYTES
    with pytest.raises(ZeroDivisionError):
        budget.pool_bytes(device, 0.5, lambda: 1 // 0)


def test_only_pages_that_hold_something_are_moved():
    swap = HostSwap(PAGE, CPU, 8, 8)
    tensors = {"latents": torch.randn(20), "text": torch.randn(16)}
    pages = paged(swap, (5, 6, 1, 7, 2), **tensors)  # three of them are used
    swap.pages(is_out=True).fill_(7)
    assert pages.swap_out((3, 4, 0, 1, 2)) == 3 * PAGE
    assert bool((swap.pages(is_out=True)[[1, 2, 5, 6, 7]] == 7).all())
    for move, blocks in ((pages.swap_in, (0, 2, 3, 4, 5)), (pages.swap_out, (7, 6, 5, 4, 3)), (pages.leave, None)):
        if blocks:
            assert move(blocks) == 3 * PAGE
        else:
            move()
        assert all(torch.equal(pages.get(name), tensor) for name, tensor in tensors.items())


def test_a_pool_that_was_made_in_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        swap = HostSwap(PAGE, CPU, 4, 4)
        swap.pages(is_out=True)
    for blocks in ((3, 0, 2), (0, 1, 2)):
        latents = torch.randn(40)
        with torch.inference_mode():
            pages = paged(swap, blocks, latents=latents)
            assert torch.equal(pages.get("latents"), latents)
        pages.put("latents", latents + 1)
        pages.swap_out((1, 0, 3))
        pages.put("latents", latents + 2)
        pages.swap_in(blocks)
        assert torch.equal(pages.get("latents"), latents + 2)


def test_the_history_of_a_tensor_stays_outside_the_pool():
    pages = PagedTensors(HostSwap(PAGE, CPU, 4, 4))
    given = 2 * torch.ones(20, requires_grad=True)
    pages.put("latents", given)
    assert not pages.get("latents").requires_grad
    for blocks in ((0, 1), (3, 2)):
        pages.enter(blocks)
        pages.put("latents", given)
        assert not pages.get("latents").requires_grad
        assert torch.equal(pages.get("latents"), given.detach())
        pages.leave()


def test_a_text_that_somebody_reads_stays_when_its_pages_become_others():
    text = TextEmbeds(torch.randn(2, 8), 2)
    pages = paged(HostSwap(PAGE, CPU, 1, 1), (0,), text=text.embeds)
    embeds = PagedText(pages, "text", text).embeds
    pages.put("text", torch.zeros(2, 8))
    assert torch.equal(embeds, text.embeds)


def test_who_leaves_twice_keeps_its_tensors():
    latents = torch.randn(2, 8)
    pages = paged(HostSwap(PAGE, CPU, 1, 1), (0,), latents=latents)
    for _ in range(2):
        pages.leave()
        assert torch.equal(pages.get("latents"), latents)


def test_a_tensor_is_read_while_its_pages_are_taken_away():
    latents = torch.randn(2, 8)
    pages = [None, paged(HostSwap(PAGE, CPU, 1, 1), (0,), latents=latents)]

    @in_pages("latents")
    class Owner:
        pages = property(lambda self: pages.pop())  # gone when it is asked for once more

    assert torch.equal(Owner().latents, latents)
    assert pages == [None]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has pinned memory")
def test_host_memory_that_cannot_be_pinned_is_used_all_the_same(caplog):
    swap = HostSwap(PAGE, torch.device("meta"), 4, 2)
    assert swap.pages(is_out=True).shape == (2, PAGE)
    assert "no pinned host memory for 2 pages" in caplog.text


def test_a_limit_rises_by_parts_of_the_most_and_never_above_it():
    limit = TokenLimit(1000)
    assert (limit.tokens, limit.is_lowered) == (1000, False)
    limit.lower(600)
    limit.lower(300)
    limit.lower(700)  # what was too much is not allowed by a smaller shortage
    seen = []
    for _ in range(8 * CALM_STEPS):
        limit.count_step()
        seen.append(limit.tokens)
    assert seen[::CALM_STEPS] == [300, 425, 550, 675, 800, 925, 1000, 1000]
    assert not limit.is_lowered


def test_a_shortage_makes_a_limit_wait_anew():
    limit = TokenLimit(800)
    limit.lower(400)
    for _ in range(CALM_STEPS - 1):
        limit.count_step()
    limit.lower(400)
    for _ in range(CALM_STEPS - 1):
        limit.count_step()
    assert limit.tokens == 400
    limit.count_step()
    assert limit.tokens == 500


def test_the_ledger_needs_no_torch():
    code = "import sys, diffusers_continuous.memory.block_pool; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
