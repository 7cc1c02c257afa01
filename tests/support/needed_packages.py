"""Modules of tests that need packages: skipped, with the reason, where one is missing.

pytest imports a module of tests to collect it, which fails without its packages.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needing(*packages, modules=None):
    """Return the hook ``pytest_pycollect_makemodule`` of a conftest.

    modules: names of the files that need the packages; all of the folder by default.
    """
    missing = [name for name in packages if find_spec(name) is None]

    def pytest_pycollect_makemodule(module_path, parent):
        if not missing or (modules and module_path.name not in modules):
            return None
        module = Skipped.from_parent(parent, path=module_path)
        module.reason = f"{' and '.join(missing)} not installed"
        return module

    return pytest_pycollect_makemodule


class Skipped(pytest.Module):
    """A module that is not imported."""

    def collect(self):
        pytest.skip(self.reason, allow_module_level=True)
