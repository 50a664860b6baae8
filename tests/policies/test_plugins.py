"""Policies of other packages: a fake distribution on sys.path, and one that pip installs."""

import subprocess
import sys
import textwrap

import pytest

from smdlib.policies import EvictionPolicy, PolicyError, available_policies, make_policy
from smdlib.policies import registry as registry_module

MODULE = """
    from dataclasses import dataclass
    from smdlib.policies import register_policy
    number = 3

    @dataclass(frozen=True)
    class Oldest:
        scale: float = 1.0

        def score(self, view):
            return -view.positions.float() * self.scale

    @register_policy("decorated")
    class Decorated(Oldest):
        pass
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution on sys.path: its name, module source, and entry points."""
    monkeypatch.setattr(registry_module, "_POLICIES", dict(registry_module._POLICIES))
    modules = set(sys.modules)

    def add(package, source, **points):
        folder = tmp_path / package
        info = folder / f"{package}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}_policies.py").write_text(textwrap.dedent(source))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"{name} = {package}_policies{value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[smdlib.policies]", *lines, ""]))
        monkeypatch.syspath_prepend(str(folder))

    yield add
    for name in set(sys.modules) - modules:
        if name.endswith("_policies"):
            del sys.modules[name]


def test_a_class_is_found_by_its_entry_point(install):
    install("acme", MODULE, oldest=":Oldest")
    assert "oldest" in available_policies()
    assert "acme_policies" not in sys.modules, "listing imports nothing"
    policy = make_policy("oldest(scale=2.0)")
    assert isinstance(policy, EvictionPolicy)
    assert policy == sys.modules["acme_policies"].Oldest(scale=2.0)
    assert make_policy("oldest") == make_policy("oldest")
    assert "decorated" in available_policies()
    with pytest.raises(TypeError, match="policy 'oldest' has no option window, its options: scale"):
        make_policy("oldest", window=1)


@pytest.mark.parametrize("value", ["", ":Decorated"])
def test_a_module_that_registers_its_policy_will_do(install, value):
    install("acme", MODULE, decorated=value)
    assert type(make_policy("decorated")).__name__ == "Decorated"


def test_a_broken_package_is_named_and_harms_nobody_else(install):
    install("broken", "import no_such_module", bad=":Policy", worse=":Policy")
    install("acme", MODULE, oldest=":Oldest", absent=":Absent", number=":number")
    assert {"bad", "worse", "oldest"} <= set(available_policies())
    make_policy("oldest")
    make_policy("snapkv")
    message = r"policy 'bad' of package broken 1.2 \(entry point bad = broken_policies:Policy\) fails to load: "
    with pytest.raises(PolicyError, match=message + "ModuleNotFoundError: No module named 'no_such_module'"):
        make_policy("bad")
    with pytest.raises(PolicyError, match=r"policy 'absent' of package acme 1.2 .*AttributeError"):
        make_policy("absent")
    with pytest.raises(PolicyError, match=r"package acme 1.2 .*policy 'number': expected a class with a method score"):
        make_policy("number")


def test_a_name_of_two_packages_is_refused(install):
    install("acme", MODULE, oldest=":Oldest")
    install("other", MODULE, oldest=":Oldest")
    with pytest.raises(
        PolicyError, match=r"'oldest' is offered by package (acme|other) 1.2 .* and package .*uninstall"
    ):
        make_policy("oldest")


def test_a_registered_name_wins(install):
    install("acme", MODULE, streaming=":Oldest")
    assert type(make_policy("streaming")).__name__ == "StreamingPolicy"


def test_importing_smdlib_loads_no_plugin(install, tmp_path):
    install("broken", "raise RuntimeError('imported')", bad=":Policy")
    code = "import sys, smdlib.policies as p; assert 'bad' in p.available_policies(), p.available_policies()"
    code += "; p.make_policy('h2o'); assert 'broken_policies' not in sys.modules"
    path = [str(tmp_path / "broken"), *sys.path]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"], check=True)


def test_a_package_that_pip_installs(tmp_path):
    pytest.importorskip("setuptools")
    (tmp_path / "pyproject.toml").write_text(
        textwrap.dedent("""
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"
        [project]
        name = "acme-policies"
        version = "0.3"
        [project.entry-points."smdlib.policies"]
        oldest = "acme_policies:Oldest"
        """)
    )
    (tmp_path / "acme_policies.py").write_text(
        "class Oldest:\n    def score(self, view): return -view.positions.float()"
    )
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-t", str(target), str(tmp_path)], check=True)
    code = "from smdlib.policies import make_policy; print(type(make_policy('oldest')).__module__)"
    path = [str(target), *sys.path]
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "acme_policies\n"
