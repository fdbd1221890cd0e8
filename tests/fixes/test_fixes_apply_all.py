"""The fix pack: applied as a whole or not at all, refused where it does not fit, reverted without a trace."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inpage.engines import contract

SCRIPT = Path(__file__).parents[2] / "fixes" / "apply_all.py"
BOTH = ["hybrid-decode-pad", "gdn-prefix-cache"]


def contents(folder: Path) -> dict[str, str]:
    """Digest by path of everything in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def run(apply_all, image, capsys):
    """`run(arguments)`: exit status and what was said."""

    def run(*arguments: str) -> tuple[int, str]:
        contract._parsed.cache_clear()
        profile = [] if "--revert" in arguments or "--profile" in arguments else ["--profile", "v0.26.0"]
        status = apply_all.main([*profile, "--target", str(image), *arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def entry_points(image: Path) -> list[str]:
    (file,) = image.glob("inpage-*.dist-info/entry_points.txt")
    return file.read_text().split("\n")[1:-1]


def test_a_profile_applies_what_everybody_wants(run, image):
    status, said = run()
    assert (status, said.split(": ")[-1]) == (0, "hybrid-decode-pad\n")
    assert entry_points(image) == ["inpage_hybrid_decode_pad = inpage.engines.plugin:register_decode_pad"]


def test_a_fix_brings_along_what_it_requires_and_comes_after_it(run, image):
    status, said = run(*reversed(BOTH))
    assert status == 0
    assert said.endswith("hybrid-decode-pad, gdn-prefix-cache\n")
    assert entry_points(image)[1] == "inpage = inpage.engines.plugin:register"


def test_applying_twice_changes_nothing(run, image):
    run("gdn-prefix-cache")
    before = contents(image)
    status, said = run("gdn-prefix-cache")
    assert (status, said[:13]) == (0, "nothing to do")
    assert contents(image) == before


def test_a_fix_can_be_added_later(run, image):
    run()
    run("gdn-prefix-cache")
    assert len(entry_points(image)) == 2


def test_reverting_leaves_the_image_as_it_was(run, image):
    before = contents(image)
    run("gdn-prefix-cache")
    assert contents(image) != before
    (image / "inpage" / "engines" / "__pycache__").mkdir()
    (image / "inpage" / "engines" / "__pycache__" / "plugin.pyc").write_bytes(b"compiled while serving")
    assert run("--revert") == (0, f"nothing of inpage is left in {image}\n")
    assert contents(image) == before
    assert not (image / "inpage").exists()
    assert run("--revert") == (0, f"nothing was applied to {image}\n")


def test_one_fix_can_be_reverted_but_not_below_another(run, image):
    run("gdn-prefix-cache")
    status, said = run("--revert", "hybrid-decode-pad")
    assert (status, said) == (1, "refused: gdn-prefix-cache requires hybrid-decode-pad: revert it as well\n")
    assert run("--revert", "gdn-prefix-cache")[0] == 0
    assert entry_points(image) == ["inpage_hybrid_decode_pad = inpage.engines.plugin:register_decode_pad"]


def test_check_says_what_is_in_place(run, image):
    status, said = run("--check", "gdn-prefix-cache")
    assert (status, said.startswith("refused: not applied to")) == (1, True)
    run("gdn-prefix-cache")
    status, said = run("--check", "gdn-prefix-cache")
    assert (status, said.startswith("in place in")) == (0, True)


def test_check_sees_a_file_that_was_changed_or_lost(run, image):
    run("gdn-prefix-cache")
    laid = image / "inpage" / "engines" / "gaudi.py"
    original = laid.read_text()
    laid.write_text(original + "\n")
    assert run("--check", "gdn-prefix-cache")[0] == 1
    laid.unlink()
    assert run("--check", "gdn-prefix-cache")[0] == 1
    assert run("gdn-prefix-cache")[0] == 0
    assert laid.read_text() == original


def test_one_changed_line_in_an_extended_function_is_refused_and_named(run, image):
    file = image / "vllm_gaudi" / "v1" / "worker" / "hpu_model_runner.py"
    file.write_text(file.read_text().replace("return 'sample_tokens'", "return 'sample_token'"))
    before = contents(image)
    status, said = run("gdn-prefix-cache")
    assert status == 1
    assert "v1/worker/hpu_model_runner.py::HPUModelRunner.sample_tokens" in said
    assert contents(image) == before
    status, said = run()  # which does not extend that function
    assert (status, said.splitlines()[-1]) == (0, f"applied to {image}: hybrid-decode-pad")


def test_a_function_that_is_missing_is_refused_even_when_unverified_sources_are_accepted(run, image, monkeypatch):
    monkeypatch.setenv("INPAGE_ACCEPT_UNVERIFIED", "1")
    file = image / "vllm_gaudi" / "v1" / "worker" / "hpu_model_runner.py"
    file.write_text(file.read_text().replace("def _update_states", "def _update_all"))
    status, said = run("gdn-prefix-cache")
    assert (status, "HPUModelRunner._update_states" in said) == (1, True)


def test_another_release_is_refused(run, image, apply_all, monkeypatch):
    monkeypatch.setattr(apply_all, "installed_version", lambda package: "0.25.1")
    assert run() == (1, "refused: vllm 0.25.1 is installed here; this profile is for 0.26.0\n")


def test_the_profile_without_verified_sources_needs_the_users_word(run, image, apply_all, monkeypatch):
    monkeypatch.setattr(apply_all, "installed_version", lambda package: "0.30.0")
    status, said = run("--profile", "v0.30.0")
    assert (status, "Set INPAGE_ACCEPT_UNVERIFIED=1 to go on" in said) == (1, True)
    monkeypatch.setenv("INPAGE_ACCEPT_UNVERIFIED", "1")
    assert run("--profile", "v0.30.0")[0] == 0


def test_an_inpage_that_pip_installed_is_left_alone(run, image):
    dist_info = image / "inpage-0.1.0.dist-info"
    dist_info.mkdir()
    (dist_info / "INSTALLER").write_text("pip\n")
    for arguments in ((), ("--revert",)):
        status, said = run(*arguments)
        assert (status, "pip uninstall inpage first" in said) == (1, True)


def test_an_upgrade_keeps_the_fixes_that_an_older_version_laid(run, image):
    run("gdn-prefix-cache")
    (dist_info,) = image.glob("inpage-*.dist-info")
    dist_info.rename(image / "inpage-0.0.1.dist-info")
    (image / "inpage" / "errors.py").write_text("# of an older version\n")
    status, said = run()
    assert (status, said.splitlines()[-1]) == (0, f"applied to {image}: hybrid-decode-pad, gdn-prefix-cache")
    assert [path.name for path in image.glob("inpage-*.dist-info")] == [dist_info.name]
    assert len(entry_points(image)) == 2


@pytest.mark.parametrize("count", range(0, 60, 3))
def test_an_interrupted_upgrade_does_not_forget_a_fix(run, image, count):
    run("gdn-prefix-cache")
    (image / "inpage" / "errors.py").write_text("# of an older version\n")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, count)
        with contextlib.suppress(InterruptionError):
            run()
    assert run()[0] == 0
    assert len(entry_points(image)) == 2
    assert not (image / ".inpage-staging").exists()


def test_an_interrupted_revert_does_not_bring_a_fix_back(run, image):
    run("gdn-prefix-cache")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, 4)
        with pytest.raises(InterruptionError):
            run("--revert")
    assert run()[0] == 0
    assert entry_points(image) == ["inpage_hybrid_decode_pad = inpage.engines.plugin:register_decode_pad"]


def test_a_removal_interrupted_before_its_last_folder_is_no_obstacle(run, image):
    clean = contents(image)
    (image / "inpage-0.1.0.dist-info").mkdir()
    assert run("gdn-prefix-cache")[0] == 0
    assert run("--revert")[0] == 0
    (image / "inpage-0.1.0.dist-info").mkdir()
    assert run("--revert") == (0, f"nothing of inpage is left in {image}\n")
    assert not list(image.glob("inpage*"))
    assert contents(image) == clean


def test_a_file_system_that_refuses_is_one_sentence(run, image, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system", str(image))

    monkeypatch.setattr(shutil, "copyfile", refuse)
    status, said = run()
    assert (status, said.splitlines()[-1].startswith("failed: [Errno 30] Read-only file system")) == (1, True)
    monkeypatch.undo()


def test_a_target_that_python_does_not_search_is_pointed_out(run, image):
    assert f"does not look for packages in {image}" in run()[1]


def test_somebody_elses_package_is_left_alone(run, image):
    (image / "inpage").mkdir()
    (image / "inpage" / "own.py").write_text("")
    assert run()[0] == run("--revert")[0] == 1
    assert (image / "inpage" / "own.py").exists()


class InterruptionError(Exception):
    """The power went."""


def interrupt_at(monkeypatch, count: int) -> list[int]:
    """The `count`-th change to the file system does not happen any more, nor any later one."""
    left = [count]

    def guarded(original):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise InterruptionError
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "rename", guarded(os.rename))
    monkeypatch.setattr(shutil, "rmtree", guarded(shutil.rmtree))
    monkeypatch.setattr(shutil, "copyfile", guarded(shutil.copyfile))
    monkeypatch.setattr(Path, "unlink", guarded(Path.unlink))
    return left


@pytest.mark.parametrize("then", ["apply", "revert"])
@pytest.mark.parametrize("what", ["apply", "upgrade", "revert"])
def test_an_interruption_at_any_point_can_be_finished_or_reverted(run, image, what, then):
    clean = contents(image)
    run("gdn-prefix-cache")
    whole = contents(image)
    for count in range(0, 400, 4):  # every fourth change: copies of single files are alike
        run("--revert")
        if what != "apply":
            run("gdn-prefix-cache" if what == "revert" else "hybrid-decode-pad")
        with pytest.MonkeyPatch.context() as patch:
            left = interrupt_at(patch, count)
            with contextlib.suppress(InterruptionError):
                run("--revert") if what == "revert" else run("gdn-prefix-cache")
        finished = left[0] >= 0
        if then == "apply":
            assert run("gdn-prefix-cache")[0] == 0
            assert contents(image) == whole
        else:
            assert run("--revert")[0] == 0
            assert contents(image) == clean
        if finished:
            return
    raise AssertionError("never got to the end")


def test_pip_can_uninstall_what_was_laid(run, image):
    clean = contents(image)
    run("gdn-prefix-cache")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "uninstall", "--yes", "inpage"]
    # -S and a path of its own: the interpreter's own site-packages, where inpage may be installed too, is not seen.
    pip_home = Path(
        subprocess.check_output([sys.executable, "-c", "import pip; print(pip.__path__[0])"], text=True).strip()
    )
    program = (
        f"import sys; sys.path[:0] = [{str(image)!r}]; sys.path.append({str(pip_home.parent)!r}); "
        "import runpy; sys.argv = ['pip', *sys.argv[1:]]; runpy.run_module('pip', run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", program, *command[3:]],
        env={**os.environ, "PYTHONNOUSERSITE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert contents(image) == clean


def test_the_script_runs_on_the_standard_library_alone(tmp_path):
    command = [sys.executable, "-S", "-E", str(SCRIPT), "--profile", "v0.26.0", "--target", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"refused: no distribution of vllm is installed for {sys.executable}: run it with")
    assert list(tmp_path.iterdir()) == []


def test_the_package_that_is_laid_imports_nothing_but_the_standard_library_until_it_is_asked(run, image):
    run("gdn-prefix-cache")
    program = (
        f"import sys; sys.path.insert(0, {str(image)!r}); from inpage.engines import plugin; plugin.register(); "
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch', 'vllm_gaudi')))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("INPAGE", "VLLM_COMPACT_GDN")}
    result = subprocess.check_output([sys.executable, "-S", "-c", program], text=True, env=environment)
    assert result == "[]\n"
