"""Every error class that can reach the HTTP layer has an answer of its own."""

import inspect
from types import ModuleType

import pytest

import app.errors
import db.errors
import providers.errors
import tools.errors


def _classes(module: ModuleType) -> list[type[Exception]]:
    return [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == module.__name__
    ]


@pytest.mark.parametrize("module", [app.errors, db.errors, providers.errors, tools.errors])
def test_every_error_class_has_a_status_of_its_own(module: ModuleType) -> None:
    assert [kind.__name__ for kind in _classes(module) if kind not in app.errors.STATUS] == []


@pytest.mark.parametrize("module", [app.errors, db.errors, providers.errors, tools.errors])
def test_every_error_class_has_a_code_that_is_snake_case(module: ModuleType) -> None:
    codes = [getattr(kind, "code", "") for kind in _classes(module)]
    assert all(code.replace("_", "").isalnum() and code == code.lower() for code in codes)
