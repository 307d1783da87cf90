"""The soak of the task frameworks in small: what `make soak` does with hundreds of tasks."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from tests.tasks.soak import FRAMEWORKS, Soaked, judge, soaked


@pytest.mark.long
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_workers_that_die_at_random_lose_nothing_and_place_each_order_once(
    rabbitmq, framework, monkeypatch
):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    seed = random.randrange(1_000_000)
    result = soaked(
        *(framework, "rabbitmq", rabbitmq.url, "place"),
        tasks=100,
        kills=2,
        seed=seed,
        limit_seconds=120,
    )
    assert not result.wrong, f"seed {seed}: {result}"
    assert result.kills == 2


def test_the_judge_of_the_soak_sees_what_is_wrong():
    """A soak that could not fail would prove nothing."""

    def wrong(counted, handler="place"):
        result = Soaked("any", "any", handler, 2, 4)
        judge(result, {"a", "b"}, Counter(counted))
        return [each.partition(":")[0] for each in result.wrong]

    assert wrong("ab") == wrong("aab", "charge") == []
    assert wrong("aab") == ["repeated in one transaction"]
    assert wrong("a") == wrong("abc", "charge") == ["not those that were sent"]
