"""Garbage is collected again after planning, whatever happened."""

import gc

import pytest

from autopar.planner import no_collection


def test_it_is_off_inside_and_as_it_was_afterwards() -> None:
    """Also after an error, and where it was off before."""
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), no_collection():
        assert 1 / gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
