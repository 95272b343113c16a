"""Random numbers of ops: they follow from seed, pass, op and place, and leave those of the process alone."""

import torch
from torch import Tensor

from autopar.runtime import Axis
from autopar.runtime.generated.random import Randomness

CPU = torch.device("cpu")


def _draw(source: Randomness, key: str = "op", *ranks: int) -> Tensor:
    axes = [Axis(f"axis{number}", 4, rank, "") for number, rank in enumerate(ranks)]
    with source.drawn(key, axes, CPU):
        return torch.rand(8)


def test_what_numbers_follow_from() -> None:
    """Equal seeds, passes, ops and places draw the same, in any order; others draw others."""
    first, second = Randomness(7), Randomness(7)
    first.advance()
    second.advance()
    drawn = _draw(first, "op", 0, 1)
    assert not torch.equal(drawn, _draw(first, "other", 0, 1))
    assert not torch.equal(drawn, _draw(first, "op", 1, 1))
    assert not torch.equal(drawn, _draw(first, "op", 0))
    assert torch.equal(drawn, _draw(second, "op", 0, 1))
    second.advance()
    assert not torch.equal(drawn, _draw(second, "op", 0, 1))


def test_the_process_goes_on_as_before() -> None:
    """Also where the op raises; a seed of the process changes nothing within."""
    source = Randomness(7)
    source.advance()
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    drawn = _draw(source)
    try:
        with source.drawn("op", (), CPU):
            torch.rand(3)
            raise ValueError
    except ValueError:
        pass
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(drawn, _draw(source))


def test_a_part_that_runs_again_draws_the_same() -> None:
    """In the backward pass, after other passes have begun; and from a state that was saved."""
    source = Randomness(7)
    state = source.get_state()
    source.advance()
    drawn = _draw(source)
    forward, again = source.contexts()
    with forward:
        assert torch.equal(drawn, _draw(source))
    source.advance()
    assert not torch.equal(drawn, _draw(source))
    for _ in range(2):
        with again:
            assert torch.equal(drawn, _draw(source))
        assert not torch.equal(drawn, _draw(source))
    source.set_state(state)
    source.advance()
    assert torch.equal(drawn, _draw(source))
