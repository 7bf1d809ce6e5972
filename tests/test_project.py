"""The project itself: packaging, what importing costs, what README promises."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ggjit as gg
from ggjit.dev import check

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()


def python(code: str, **keywords) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, **keywords)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packages_are_listed():
    found = set()
    for package, folder in (("ggjit", ROOT / "ggjit"), ("ggjit.ops", ROOT / "ops")):
        for path in folder.rglob("__init__.py"):
            inner = path.parent.relative_to(folder).parts
            if package == "ggjit" and inner[:1] == ("ops",):
                continue
            found.add(".".join([package, *inner]))
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found


def test_folders_of_modules_are_packages():
    for folder in (ROOT / "ggjit", ROOT / "ops"):
        for path in folder.rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_ops_is_a_link():
    link = ROOT / "ggjit" / "ops"
    assert link.is_symlink() and link.readlink() == Path("../ops")
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-s", "ggjit/ops"], capture_output=True, text=True, cwd=ROOT)
        assert listed.returncode != 0 or listed.stdout.startswith("120000"), listed.stdout


def test_numba_is_pinned_to_tested_minors():
    import llvmlite
    import numba

    pins = {line.split(">=")[0]: line for line in PYPROJECT["project"]["dependencies"]}
    for module in (numba, llvmlite):
        major, minor = module.__version__.split(".")[:2]
        assert pins[module.__name__] == f"{module.__name__}>={major}.{minor},<{major}.{int(minor) + 1}"


@pytest.mark.parametrize("name", ["ggjit", "ggjit.ops", "ggjit.cli", "ggjit.gguf", "ggjit.lower"])
def test_importing_does_not_import_numba(name):
    assert python(f"import sys, {name}; print('numba' in sys.modules)").split() == ["False"]


def test_version_is_said_once():
    assert PYPROJECT["project"]["version"] == gg.__version__


def test_public_names_have_docstrings():
    for name in gg.__all__:
        if name in gg._LAZY:
            continue
        value = getattr(gg, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def command(marker: str) -> str:
    (text,) = re.findall(rf"<!-- {marker} -->\n```sh\n(.*)\n```", README)
    return text


def test_readme_commands_set_up_an_environment():
    for marker, last in (("run", "ggjit run "), ("tests", "python -m pytest -q")):
        make, activate, install, run = command(marker).split(" && ")
        assert make == "python3 -m venv .venv" and activate == ". .venv/bin/activate"
        extra = re.fullmatch(r"pip install -q -e '\.\[(\w+)\]'", install)
        assert extra and extra[1] in PYPROJECT["project"]["optional-dependencies"]
        assert run.startswith(last)


@pytest.mark.parametrize("example", [b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "gg.Context" in b])
def test_readme_graph_examples(example, tmp_path):
    (tmp_path / "example.py").write_text(f"import numpy as np\nimport ggjit as gg\n\n{example}")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import example"
    assert python(code).rstrip("\n") == re.search(r"    print\(.*\) +# (.*)", example)[1]


def test_an_op_of_a_notebook_may_be_made_again():
    assert python(
        "import ggjit as gg\n"
        "first, second = gg.Op('mine'), gg.Op('mine')\n"
        "from ggjit import op\n"
        "print(op.by_name('mine') is second, op.by_id(first.id) is first, first.id != second.id)\n"
        "try: gg.Op('sqr' if gg.sqr else '')\n"
        "except ValueError as error: print(error)\n"
    ).splitlines() == ["True True True", "Op: name must be new, got 'sqr'"]


def test_lazy_names_are_no_modules():
    """The import system sets a module as an attribute of its package, over a function of the same name."""
    assert not set(gg._LAZY) & {path.stem for path in (ROOT / "ggjit").iterdir()}


def test_names_are_listed_for_completion():
    assert {"LLM", "Q4_0", "F32", "mul_mat", "new_node"} <= set(dir(gg))


def test_wheel_check_finds_missing_files(tmp_path):
    import zipfile

    wheel = tmp_path / "ggjit-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("ggjit/__init__.py", "")
    missing = check._missing(wheel)
    assert "ggjit/tensor.py" in missing and "ggjit/ops/lib/emit.py" in missing and "ggjit/__init__.py" not in missing


def test_check_refuses_unknown_parts():
    done = subprocess.run(
        [sys.executable, "-m", "ggjit.dev", "check", "lint", "nonsense"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_families_are_imported_by_many_threads_at_once():
    """Each name is its function, or the file of its name that can be called; also after one was taken away."""
    code = (
        "import sys, threading\n"
        "sys.setswitchinterval(1e-6)\n"
        "import ggjit as gg\n"
        "import ggjit.ops as ops\n"
        "names, wrong, start = list(ops.__all__), [], threading.Barrier(8)\n"
        "def look(ith):\n"
        "    start.wait()\n"
        "    for name in names[ith::3] + names:\n"
        "        try:\n"
        "            function = getattr(gg if ith % 2 else ops, name)\n"
        "            if not callable(function): wrong.append(name)\n"
        "        except Exception as error:\n"
        "            wrong.append((name, repr(error)))\n"
        "threads = [threading.Thread(target=look, args=(i,)) for i in range(8)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "print(wrong)\n"
        "del ops.rms_norm\n"
        "print(ops.rms_norm.__name__, hasattr(gg, 'rms_norm'), getattr(gg, 'a.b', 5), getattr(ops, 'a.b', 6))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stdout == "[]\nrms_norm True 5 6\n", out.stdout + out.stderr


def test_a_file_and_a_builder_of_the_same_name():
    """What `import` gives is the file, whatever was looked at before; called, it is the builder."""
    for before in (
        "pass",
        "gg.norm",
        "gg.ops.norm",
        "from ggjit import norm",
        "from ggjit.ops.group_norm import group_norm",
    ):
        code = (
            "import inspect, pickle, ggjit as gg\n"
            f"{before}\n"
            "import ggjit.ops.norm as family\n"
            "print(family.RMS_NORM, gg.ops.norm is family, gg.norm is family.norm, gg.ops.binary.ADD, gg.ops.quants)\n"
            "with gg.Context(1 << 14): print(gg.ops.norm(gg.new_tensor(gg.F32, 4), 1e-5).op)\n"
            "print(inspect.signature(family) == inspect.signature(gg.norm))\n"
            "print(pickle.loads(pickle.dumps(family)) is family)\n"
        )
        rms_norm, same, builder, add, *_quants, op, signature, pickled = python(code).split()
        assert (rms_norm, same, builder, add, op, signature, pickled) == (
            "rms_norm", "True", "True", "add", "norm", "True", "True"
        )  # fmt: skip


def test_families_are_imported_when_they_are_used():
    """`import ggjit`, an op of one family, the file of another; what a file lists is what it has."""
    code = (
        "import sys, ggjit as gg\n"
        "families = lambda: sorted(m for m in sys.modules if m.startswith('ggjit.ops.') and m.count('.') == 2)\n"
        "dir(gg), gg.ops.__all__\n"
        "print(families())\n"
        "from ggjit.ops.scale import SCALE\n"
        "print(families(), gg.scale.__name__, gg.ops.scale.scale is gg.scale)\n"
        "from ggjit import norm\n"
        "print('ggjit.ops.norm' in families(), 'ggjit.ops.conv' in families(), norm is gg.ops.norm.norm)\n"
        "listed = list(gg.ops.__all__)\n"
        "gg.ops.load_all()\n"
        "had = [f for m in families() if m.count('.') == 2 for f in getattr(sys.modules[m], '__all__', ())]\n"
        "print(sorted(had) == sorted(listed), all(callable(getattr(gg, f)) for f in listed))\n"
    )
    assert python(code).splitlines() == [
        "[]",
        "['ggjit.ops.scale'] scale True",
        "True False True",
        "True True",
    ]
