"""Pages and swapping: nothing is lost, nothing is owned twice, and what comes back is what went out, bit by bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diffusers_continuous.memory.block_pool import BlockPool, BlockPoolError
from diffusers_continuous.memory.host_swap import HostSwap

PAGE = 64
NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 9


class Swapping(RuleBasedStateMachine):
    """Owners come, write, go out, come back and are cancelled in any order; a plain dict says what they must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.swap = HostSwap(torch.device("cpu"), PAGE, NUM_BLOCKS, NUM_HOST_BLOCKS)
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        self.out: set[int] = set()
        self.count = 0
        self.blocks: dict[int, int] = {}

    def pick(self, data: st.DataObject, owners: set[int]) -> int:
        return data.draw(st.sampled_from(sorted(owners)))

    @rule(num_blocks=st.integers(1, 5))
    def allocate(self, num_blocks: int) -> None:
        self.count += 1
        free = NUM_BLOCKS - sum(n for owner, n in self.blocks.items() if owner not in self.out)
        if num_blocks > free:
            with pytest.raises(BlockPoolError):
                self.swap.pool.allocate(num_blocks, self.count)
            return
        self.swap.pool.allocate(num_blocks, self.count)
        self.blocks[self.count], self.expected[self.count] = num_blocks, {}

    @precondition(lambda self: set(self.blocks) - self.out)
    @rule(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), size=st.integers(1, 40))
    def write(self, data: st.DataObject, dtype: torch.dtype, size: int) -> None:
        owner = self.pick(data, set(self.blocks) - self.out)
        held = self.expected[owner]
        tensor = torch.randn(size).to(dtype)
        room = self.blocks[owner] - sum(self.swap.num_blocks_for(t.numel() * t.element_size()) for t in held.values())
        name = f"t{len(held)}"
        if self.swap.num_blocks_for(size * dtype.itemsize) > room:
            with pytest.raises(BlockPoolError):
                self.swap.put(owner, name, tensor)
            return
        self.swap.put(owner, name, tensor)
        held[name] = tensor

    @precondition(lambda self: any(self.expected[owner] for owner in set(self.blocks) - self.out))
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        owner = self.pick(data, {owner for owner in set(self.blocks) - self.out if self.expected[owner]})
        name = data.draw(st.sampled_from(sorted(self.expected[owner])))
        self.expected[owner][name] = torch.randn(self.expected[owner][name].shape).to(self.expected[owner][name].dtype)
        self.swap.put(owner, name, self.expected[owner][name])

    @precondition(lambda self: set(self.blocks) - self.out)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        owner = self.pick(data, set(self.blocks) - self.out)
        fits = self.blocks[owner] <= NUM_HOST_BLOCKS - sum(self.blocks[each] for each in self.out)
        assert self.swap.can_swap_out(owner) == fits
        if not fits:
            with pytest.raises(BlockPoolError):
                self.swap.swap_out(owner)
            return
        self.swap.swap_out(owner)
        self.out.add(owner)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        owner = self.pick(data, self.out)
        used = sum(n for each, n in self.blocks.items() if each not in self.out)
        if self.blocks[owner] > NUM_BLOCKS - used:
            with pytest.raises(BlockPoolError):
                self.swap.swap_in(owner)
            return
        self.swap.swap_in(owner)
        self.out.remove(owner)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        owner = self.pick(data, set(self.blocks))
        self.swap.release(owner)
        self.swap.release(owner)
        del self.blocks[owner], self.expected[owner]
        self.out.discard(owner)

    @invariant()
    def the_books_add_up(self) -> None:
        self.swap.check_integrity()
        assert self.swap.pool.num_used == sum(n for owner, n in self.blocks.items() if owner not in self.out)
        assert self.swap.host_pool.num_used == sum(self.blocks[owner] for owner in self.out)

    @invariant()
    def everybody_holds_what_it_wrote(self) -> None:
        for owner, tensors in self.expected.items():
            assert self.swap.is_out(owner) == (owner in self.out)
            for name, tensor in tensors.items():
                if owner in self.out:
                    with pytest.raises(BlockPoolError):
                        self.swap.get(owner, name)
                else:
                    got = self.swap.get(owner, name)
                    assert got.dtype == tensor.dtype
                    assert torch.equal(got, tensor)

    def teardown(self) -> None:
        for owner in list(self.blocks):
            self.swap.release(owner)
        assert (self.swap.pool.num_used, self.swap.host_pool.num_used, dict(self.swap.places)) == (0, 0, {})


TestSwapping = Swapping.TestCase
TestSwapping.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_books_that_do_not_add_up_are_printed():
    pool = BlockPool(4)
    pool.allocate(2, "a")
    pool._free.pop()
    with pytest.raises(BlockPoolError, match="'a': 2"):
        pool.check_integrity()


def test_what_moved_is_counted():
    swap = HostSwap(torch.device("cpu"), PAGE, 4, 4)
    swap.pool.allocate(3, "a")
    swap.swap_out("a")
    swap.swap_in("a")
    assert (swap.swapped_out_bytes, swap.swapped_in_bytes) == (3 * PAGE, 3 * PAGE)


def test_the_last_tensor_can_give_its_pages_to_another():
    swap = HostSwap(torch.device("cpu"), PAGE, 4, 4)
    swap.pool.allocate(3, "a")
    swap.put("a", "latents", torch.zeros(16))
    swap.put("a", "text", torch.zeros(16))
    with pytest.raises(BlockPoolError):
        swap.drop("a", "latents")
    swap.drop("a", "text")
    sample = torch.arange(32.0)
    swap.put("a", "sample", sample)
    assert torch.equal(swap.get("a", "sample"), sample)


def test_the_ledger_needs_no_torch():
    code = "import sys, diffusers_continuous.memory.block_pool; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
