"""What a step at ZeRO-3 moves, by hand for small models; test_many_ranks.py has what real ranks moved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.zero3_traffic import (
    Moved,
    Sharding,
    Tour,
    Visit,
    Weight,
    persistent_places,
    sent_bytes,
    step_traffic,
)

BARE = Sharding(ranks=4, gradient_bytes=2, prefetch=0, max_reuse=0, persistence=0)
"""Nothing is gathered ahead, kept for later, or whole."""
FORWARD, BACKWARD = Moved("all_gather", "forward", 4), Moved("all_gather", "backward", 4)
AFTER, REDUCED = Moved("all_gather", "step", 4), Moved("reduce_scatter", "backward", 4)


def chain(*elements: int, trained: bool = True, checkpointed: bool = False) -> Tour:
    """Modules of one weight each, one after the other."""
    count = len(elements)
    visits: list[Visit] = []
    for module in range(count):
        visits += [Visit(module, "forward"), Visit(module, "after_forward")]
    for module in reversed(range(count)):
        visits.append(Visit(module, "backward"))
        if checkpointed:
            visits += [Visit(module, "recompute"), Visit(module, "after_forward")]
        visits.append(Visit(module, "after_backward"))
    return Tour(
        weights=tuple(Weight(elements=each, width=2, trained=trained) for each in elements),
        modules=tuple((place,) for place in range(count)),
        visits=tuple(visits),
    )


def test_without_any_keeping_each_weight_is_gathered_for_each_pass() -> None:
    traffic = step_traffic(chain(100, 40), BARE)
    assert traffic == {FORWARD: 280, BACKWARD: 280, REDUCED: 280}
    assert sent_bytes(traffic) == 3 * 3 * 280 // 4


def test_every_shard_is_padded_and_so_is_every_gradient() -> None:
    traffic = step_traffic(chain(101, 1), BARE)
    assert traffic[FORWARD] == traffic[REDUCED] == 2 * (104 + 4)
    unscattered = step_traffic(chain(101, 1), replace(BARE, reduce_scatter=False))
    assert unscattered[Moved("all_reduce", "backward", 4)] == 2 * 102


def test_what_is_used_again_soon_stays() -> None:
    """The last one is used again at once; by a longer distance the first as well."""
    near = step_traffic(chain(100, 40), replace(BARE, max_reuse=1))
    assert (near[FORWARD], near[BACKWARD]) == (280, 200)
    far = step_traffic(chain(100, 40), replace(BARE, max_reuse=1000))
    assert FORWARD in far and BACKWARD not in far


def test_gathering_ahead_moves_no_more_and_its_room_is_bounded() -> None:
    tour = chain(100, 40, 60, 80)
    plain = step_traffic(tour, BARE)
    ahead = step_traffic(tour, replace(BARE, prefetch=50))
    assert sum(ahead.values()) < sum(plain.values())  # what it has passed over stays for the backward pass
    none_live = step_traffic(tour, replace(BARE, prefetch=50, max_live=0))
    assert none_live == plain


def test_small_weights_are_gathered_once_a_step_however_many_micro_batches() -> None:
    sharding = replace(BARE, persistence=40, grad_accum=3)
    traffic = step_traffic(chain(100, 40), sharding)
    assert traffic == {FORWARD: 600, BACKWARD: 600, AFTER: 80, REDUCED: 840}
    limited = replace(sharding, model_persistence=45)
    assert persistent_places(chain(30, 100, 20, 10).weights, limited) == (0, 3)


def test_frozen_weights_are_gathered_and_have_no_gradient() -> None:
    traffic = step_traffic(chain(100, trained=False), BARE)
    assert traffic == {FORWARD: 200, BACKWARD: 200}
    again = step_traffic(chain(100, 40, trained=False, checkpointed=True), BARE)
    assert again == {FORWARD: 280, BACKWARD: 280}  # the recomputation's gather serves the backward pass


def test_second_shards_keep_all_but_a_steps_first_gathers_within_their_group() -> None:
    sharding = replace(BARE, hpz=2, grad_accum=2)
    traffic = step_traffic(chain(100, 40), sharding)
    near_forward, near = Moved("all_gather", "forward", 2), Moved("all_gather", "backward", 2)
    assert traffic == {FORWARD: 280, near_forward: 280, near: 560, REDUCED: 560}
    frozen = step_traffic(chain(100, trained=False), sharding)
    assert frozen == {near_forward: 400, near: 400}


def test_what_no_module_lets_go_is_let_go_at_the_end_and_gathered_again() -> None:
    """A module whose input needs no gradient, as an embedding, is never told of its backward's end."""
    tour = chain(100, 40)
    kept = Tour(weights=tour.weights, modules=tour.modules, visits=tour.visits[:-1])
    assert step_traffic(kept, replace(BARE, grad_accum=2)) == {FORWARD: 560, BACKWARD: 560, REDUCED: 560}


def test_tied_weights_stay_while_one_of_their_modules_is_entered() -> None:
    whole = [Visit(0, "forward"), Visit(1, "forward"), Visit(1, "after_forward"), Visit(0, "after_forward")]
    tour = Tour(weights=(Weight(elements=100, width=2),), modules=((0,), (0,)), visits=tuple(whole))
    assert step_traffic(tour, BARE)[FORWARD] == 200


def test_one_rank_moves_nothing() -> None:
    assert step_traffic(chain(100, 40), replace(BARE, ranks=1)) == {}


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    st.sampled_from([2, 4, 8]),
    st.integers(0, 9000),
    st.integers(0, 9000),
    st.integers(0, 9000),
    st.integers(0, 800),
    st.booleans(),
)
def test_it_lies_between_one_gather_of_each_weight_and_one_for_each_use(
    elements: list[int], ranks: int, prefetch: int, live: int, reuse: int, small: int, again: bool
) -> None:
    sharding = replace(
        BARE, ranks=ranks, prefetch=prefetch, max_live=live, max_reuse=reuse, persistence=small
    )
    tour = chain(*elements, checkpointed=again)
    traffic = step_traffic(tour, sharding)
    gathered = sum(size for moved, size in traffic.items() if moved.kind == "all_gather")
    padded = sum(2 * -(-each // ranks) * ranks for each in elements)
    uses = 3 if again else 2
    assert padded <= gathered <= uses * padded
    assert traffic[Moved("reduce_scatter", "backward", ranks)] == padded
