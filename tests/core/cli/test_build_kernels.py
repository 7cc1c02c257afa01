"""``inl build-kernels``: asks each installed backend to build what it has to."""

from __future__ import annotations

from inl.install_command import install_command

PLUGIN = """
from pathlib import Path
from inl.plugin import hookimpl
{line}
def build(*, every, report):
    report and report(1, 1, "one.c")
    return Path("npu.so"), every

@hookimpl
def inl_register_backends(register):
    register("npu", "fake_npu:make")
"""


def test_backends_build_what_they_have(inl, plugin):
    env = plugin(PLUGIN.format(line="INL_BUILD_KERNELS = 'fake_npu:build'"))
    done = inl("build-kernels", "--all", env=env)
    assert done.returncode == 0, done.stderr
    assert "npu.so" in done.stdout
    assert "True" in done.stdout


def test_a_plugin_may_be_an_object(inl, plugin):
    source = (
        PLUGIN.format(line="")
        + """
class Plugin:
    INL_BUILD_KERNELS = "fake_npu:build"

    @hookimpl
    def inl_register_backends(self, register):
        register("npu", "fake_npu:make")

it = Plugin()
"""
    )
    env = plugin(source)
    done = inl("build-kernels", env={**env, "INL_PLUGINS": "fake_npu:it"})
    assert done.returncode == 0, done.stderr
    assert "npu.so" in done.stdout


def test_a_wrong_name_is_an_error_of_the_plugin(inl, plugin):
    env = plugin(PLUGIN.format(line="INL_BUILD_KERNELS = 'fake_npu:no_such'"))
    done = inl("build-kernels", env=env)
    assert done.returncode == 2
    assert "cannot load the build of its kernels, fake_npu:no_such" in done.stderr


def test_without_such_a_backend_the_command_names_one(inl, plugin):
    env = plugin(PLUGIN.format(line=""))
    done = inl("build-kernels", env=env)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(f"Try: {install_command('inl-cpu')}")
