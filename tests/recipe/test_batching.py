from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_sft.errors import ConfigError, DataError
from ds_sft.recipe.batching import BatchPlan, EvalPlan
from ds_sft.recipe.recipe import Recipe


def recipe(batch: int, groups: int) -> Recipe:
    return Recipe(model_id="m", learning_rate=1.0, train_batch_size=batch, loss_groups=groups)


@given(
    groups=st.integers(1, 4), group_size=st.integers(1, 9), world=st.integers(1, 5),
    pdb=st.integers(1, 3), packs=st.integers(1, 30), step=st.integers(0, 50),
)  # fmt: skip
def test_every_pack_of_a_step_is_active_exactly_once(groups, group_size, world, pdb, packs, step):
    plan = BatchPlan(recipe(groups * group_size, groups), [7] * packs, world_size=world,
                     per_device_batch=pdb, allow_idle=True)  # fmt: skip
    micros = [list(plan.micro_batches(step, rank)) for rank in range(world)]
    assert {len(m) for m in micros} == {plan.micro_per_step}
    assert all(len(m.packs) == pdb for rank in micros for m in rank)
    for g in range(groups):
        active = [
            p for rank in micros for m in rank if m.group == g for p in m.packs[: m.num_active]
        ]
        start = step * groups * group_size + g * group_size
        assert Counter(active) == Counter((start + i) % packs for i in range(group_size))


@given(world=st.integers(1, 4), pdb=st.integers(1, 2))
def test_averaged_scaled_losses_equal_the_mean_over_groups_of_token_means(world, pdb):
    """10 tokens of loss 1 and 30 of loss 3 in one group give 2.5, whatever the split over ranks."""
    counts, loss = [10, 30, 0, 8], [1.0, 3.0, 5.0, 2.0]
    plan = BatchPlan(recipe(4, 2), counts, world_size=world, per_device_batch=pdb, allow_idle=True)
    total = 0.0
    for rank in range(world):
        for m in plan.micro_batches(0, rank):
            total += m.scale * sum(counts[p] * loss[p] for p in m.packs[: m.num_active])
    assert total / world == pytest.approx((2.5 + 2.0) / 2, abs=1e-12)


def test_order_wraps_around_and_follows_a_given_order():
    plan = BatchPlan(recipe(4, 2), [1] * 3, world_size=1, order=[2, 0, 1])
    assert plan.group_packs(0, 0) == [2, 0]
    assert plan.group_packs(0, 1) == [1, 2]
    assert plan.group_packs(1, 0) == [0, 1]


def test_too_many_idle_slots_are_refused_unless_allowed():
    with pytest.raises(ConfigError, match=r"33% of the slots would idle.*--allow-idle"):
        BatchPlan(recipe(8, 2), [1] * 8, world_size=6)
    assert BatchPlan(recipe(8, 2), [1] * 8, world_size=6, allow_idle=True).idle_slots == 4
    assert BatchPlan(recipe(8, 2), [1] * 8, world_size=4).idle_slots == 0


def test_batch_that_groups_do_not_divide_is_refused_with_the_nearest_sizes():
    with pytest.raises(ConfigError, match=r"train_batch_size=65 .* 2 loss groups: use 64 or 66"):
        recipe(65, 2)


def test_a_group_without_target_is_found_before_the_run():
    plan = BatchPlan(recipe(4, 2), [3, 0, 0, 0], world_size=1)
    with pytest.raises(DataError, match="loss group 1 of step 0"):
        plan.check_targets(1)
    BatchPlan(recipe(4, 2), [3, 0, 1, 0], world_size=1).check_targets(100)


def test_a_group_larger_than_the_data_set_counts_packs_again():
    plan = BatchPlan(recipe(10, 2), [2, 0], world_size=1)
    plan.check_targets(3)
    assert plan.step_tokens(0) == [6, 4]


@given(packs=st.integers(1, 40), world=st.integers(1, 6), pdb=st.integers(1, 4))
def test_an_evaluation_sees_every_pack_once_in_as_many_microbatches_on_every_rank(
    packs, world, pdb
):
    plan = EvalPlan(num_packs=packs, world_size=world, per_device_batch=pdb)
    micros = [list(plan.micro_batches(rank)) for rank in range(world)]
    assert {len(m) for m in micros} == {plan.num_micro}
    assert all(len(m.packs) == pdb and m.scale == 1.0 for rank in micros for m in rank)
    assert sorted(p for rank in micros for m in rank for p in m.packs[: m.num_active]) == list(
        range(packs)
    )


def test_ranks_without_a_pack_compute_one_that_does_not_count():
    plan = EvalPlan(num_packs=2, world_size=3, per_device_batch=2)
    rows = [[(m.packs, m.num_active) for m in plan.micro_batches(rank)] for rank in range(3)]
    assert rows == [[((0, 1), 2)], [((0, 0), 0)], [((0, 0), 0)]]
