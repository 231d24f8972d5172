"""The command line: one line and a code for everything that goes wrong, and commands that work
without a model."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from gen.__main__ import main
from gen.bench import run as bench
from gen.cli.parser import parse
from gen.contracts.modality import Modality, Verdict
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.stats import Stats
from gen.store.ledger import read_rows

RING = "a small blue ring in the centre"


class Toy:
    name, extension, media_kind, default_sampling = "toy", "txt", "data", {"top_k": 7}
    also, formats = (), ()
    models: dict[str, str] = {}
    default_samplers = Modality.default_samplers
    masked_params = Modality.masked_params

    def condition(self, prompt):
        if "!" in prompt:
            raise GenError(f"prompt {prompt!r} holds '!'")
        return prompt

    def save(self, media, path, info):
        path.write_text(media)

    def load(self, path):
        return path.read_text()

    def check(self, media, prompt):
        return Verdict(prompt in media, True, "")

    def judge(self, media, condition):
        return self.check(media, condition.text or "")

    def media_part(self, condition):
        return ""

    def example_prompts(self, count, seed):
        return [f"prompt {seed} {i}" for i in range(count)]


class Pipe:
    """Makes the prompt itself. ``error``: what generating raises instead."""

    error: BaseException | None = None
    seen: list = []
    told: list = []

    modality = Toy()
    device = torch.device("cpu")

    def prompt_lengths(self, items, sampler):
        return [0] * len(items)

    def guarantee(self, sampler):
        return sampler.guarantee

    def turns(self, sampler):
        return 1

    def plan(self, prompts, num_samples, seed):
        return [
            types.SimpleNamespace(
                prompt=str(self.modality.condition(p)),
                seed=seed + j,
                max_new_tokens=None,
                given=None,
            )
            for p in prompts
            for j in range(num_samples)
        ]

    def model_name(self, spec):
        if resolve_sampler(spec)[0].protocol == "masked":
            raise GenError("no masked model")
        return "toy-model"

    def generate(
        self, items, sampler, sampling, *, trace=False, callback=None, start=None, max_batch=None
    ):
        self.seen.append((sampler, sampling))
        if Pipe.error is not None:
            raise Pipe.error
        nfe = 12 if sampler["name"] == "autoregressive" else 3
        stats = [Stats(nfe, 12, 12, 12, 12 / nfe, seconds=0.1) for _ in items]
        return types.SimpleNamespace(
            media=[i.prompt for i in items],
            stats=stats,
            traces=None,
            logprobs=None,
            items=items,
            model="toy-model",
            grid=(),
        )


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    registry.discover()
    monkeypatch.setitem(registry._kinds["modality"], "toy", Toy)
    monkeypatch.setattr(
        "gen.gallery.write.write_gallery",
        lambda folder: (folder / "index.html").write_text("gallery") and folder / "index.html",
    )
    monkeypatch.setattr(
        "gen.pipeline.pipeline.load",
        lambda modality, **how: Pipe.told.append(how) or Pipe(),
    )
    monkeypatch.setattr(Pipe, "error", None)
    monkeypatch.setattr(Pipe, "seen", [])
    monkeypatch.setattr(Pipe, "told", [])
    monkeypatch.delenv("GEN_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)


def gen(capsys, *argv: str) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *argv: str) -> str:
    code, out, err = gen(capsys, *argv)
    assert code == 2 and out == "" and err.startswith("gen: ") and err.count("\n") == 1
    return err


# --- mistakes


@pytest.mark.parametrize(
    "argv, says",
    [
        (["smple"], "Did you mean 'sample'"),
        (["ls", "smplers"], "Did you mean 'samplers'"),
        (["sample", "image", RING, "--sed", "3"], "Did you mean '--seed'"),
        (["sample", "image", RING, "--sed=3"], "Did you mean '--seed'"),
        (["sample", "image", "a", "small", "ring"], "a prompt of several words in quotes"),
        (["sample", "image"], "prompts.0 is ''"),
        (["sample", "imge", RING], "Did you mean 'image'"),
        (["sample", "toy", "x!"], "holds '!'"),
        (["sample", "toy", ""], "prompts.0"),
        (["sample", "toy", "x", "--seed", "-1"], "seed is -1"),
        (["sample", "toy", "x", "--seed", "1.5"], "--seed"),
        (["sample", "toy", "x", "--num-samples", "0"], "num_samples is 0"),
        (["sample", "toy", "x", "--sampler", "sjdd"], "Did you mean 'sjd'"),
        (["sample", "toy", "x", "sampler.windw=3"], "Did you mean 'window'"),
        (["sample", "toy", "x", "--temperature", "-1"], "sampling.temperature"),
        (["sample", "toy", "x", "--source", "absent.png"], "absent.png"),
        (["run", "image/sjdd"], "Did you mean 'image/sjd'"),
        (["run", "image/sjd", "sede=3"], "Did you mean 'seed'"),
        (["run", "image/sjd", "--dryrun"], "Did you mean '--dry-run'"),
        (["show", "absent.yaml"], "absent.yaml"),
        (["status", "absent"], "absent"),
        (["gallery", "."], "plan.json"),
        (["check", "absent"], "absent"),
        (["bench", "image", "--batch-sizes", "0"], "--batch-sizes"),
        (["bench", "image", "--sweep", "window"], "--sweep"),
        (["bench", "image", "--sweep", "windw=4"], "a parameter that none"),
        (["bench", "image", "--samplers", "sjdd"], "Did you mean 'sjd'"),
        (["bench", "image", "--out", "no/such/folder.json"], "--out"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys, argv, says):
    assert says in refused(capsys, *argv)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "error, code, says",
    [
        (GenError("no such thing"), 2, "gen: no such thing"),
        (
            OSError(errno.ENOSPC, "No space left on device", "weights"),
            2,
            "gen: weights: No space left on device",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_end_has_its_code_and_no_traceback(capsys, monkeypatch, error, code, says):
    monkeypatch.setattr(Pipe, "error", error)
    got, out, err = gen(capsys, "sample", "toy", "x")
    assert (
        got == code
        and says in err.splitlines()[-1]
        and "Traceback" not in err
        and "gallery" not in out
    )


def test_a_request_to_terminate_keeps_what_is_finished_and_the_same_command_resumes(
    capsys, monkeypatch
):
    argv = ("sample", "toy", "x", "--out", "o", "--num-samples", "3", "--batch-size", "1")
    plain = Pipe.generate

    def generate(self, items, *args, **kwargs):
        if items[0].seed == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, items, *args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(Pipe, "generate", generate)
        code, _out, err = gen(capsys, *argv)
        assert code == 75 and "SIGTERM received" in err and "stopped with 1 item left" in err
    assert [r["seed"] for r in read_rows(Path("o"))] == [0, 1]  # what was at work is finished first
    Pipe.seen.clear()
    assert gen(capsys, *argv)[0] == 0 and len(Pipe.seen) == 1 and len(read_rows(Path("o"))) == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_fault_in_gen_is_one_line_too_and_the_debug_variable_shows_where(capsys, monkeypatch):
    monkeypatch.setattr(Pipe, "plan", lambda *a: 1 / 0)
    code, _, err = gen(capsys, "sample", "toy", "x")
    assert code == 3 and "ZeroDivisionError" in err and "Traceback" not in err
    monkeypatch.setenv("GEN_DEBUG", "1")
    assert "Traceback" in gen(capsys, "sample", "toy", "x")[2]


def test_failed_items_are_code_1_and_one_clear_line(capsys, monkeypatch):
    monkeypatch.setattr(Pipe, "error", ValueError("nan in logits"))
    code, out, err = gen(capsys, "sample", "toy", "x", "--out", "o")
    assert (
        code == 1
        and "1 of 1 items failed (000000: ValueError: nan in logits)" in err
        and "o/index.html" in out
    )
    assert "failed" in gen(capsys, "status", "o")[1]
    monkeypatch.setattr(Pipe, "error", None)
    assert gen(capsys, "sample", "toy", "x", "--out", "o")[0] == 1  # only when told to
    assert gen(capsys, "sample", "toy", "x", "--out", "o", "retry=failed")[0] == 0


# --- making


def test_sample_writes_a_folder_and_says_where(capsys):
    code, out, err = gen(
        capsys,
        "sample",
        "toy",
        "x",
        "--num-samples",
        "2",
        "--seed",
        "5",
        "--temperature",
        "0.5",
        "sampler.window=8",
    )
    (folder,) = Path("out/toy").iterdir()
    assert re.fullmatch("x-[0-9a-f]{6}", folder.name)
    assert code == 0 and out.splitlines() == [
        "speculative_jacobi: 2 items, 3 forward passes and 0.1 s per item (means)",
        f"gallery: {folder}/index.html",
    ]
    assert [r["seed"] for r in read_rows(folder)] == [5, 6] and "2/2 items" in err
    sampler, sampling = Pipe.seen[0]
    assert (sampler["name"], sampler["window"], sampling["temperature"], sampling["top_k"]) == (
        "speculative_jacobi",
        8,
        0.5,
        7,
    )


def test_set_is_a_key_of_the_job_file_as_a_flag(capsys):
    flags = ("--set", "sampler.window=8", "--set", "sampler.init=repeat")
    assert gen(capsys, "sample", "toy", "x", "--seed", "1", *flags)[0] == 0
    sampler = Pipe.seen[0][0]
    assert (sampler["window"], sampler["init"]) == (8, "repeat")
    assert "expected KEY=VALUE" in refused(capsys, "sample", "toy", "x", "--set", "sampler")


def test_flags_of_the_model_reach_the_pipeline(capsys):
    for command in (("sample", "toy", "x"), ("bench", "toy", "--quick", "--samplers", "sjd")):
        assert gen(capsys, *command, "--compile")[0] == gen(capsys, *command, "--seed", "2")[0] == 0
    assert [how["compile"] for how in Pipe.told] == [True, False] * 2
    assert "compile" in refused(capsys, "bench", "jobs", "--compile") and "--compile" in refused(
        capsys, "bench", "toy", "--oracle", "--compile"
    )


def test_the_distribution_of_a_preset_stands_over_the_modalitys(capsys, monkeypatch):
    monkeypatch.setattr(Toy, "default_sampling", {"temperature": 0.9, "top_k": 7})
    assert gen(capsys, "sample", "toy", "x", "--sampler", "jacobi")[0] == 0
    assert Pipe.seen[0][1]["temperature"] == 0 and Pipe.seen[0][1]["top_k"] == 7


@pytest.mark.parametrize(
    ("words", "prompt", "overrides"),
    [
        (["circle"], "circle", []),
        (["--model", "M", "circle"], "circle", []),
        (["--seed", "1", "3 + 8 + 5 =", "out=x"], "3 + 8 + 5 =", ["out=x"]),
        (["out=x", "a circle"], "a circle", ["out=x"]),
        (["seed=1", "--model", "M"], "", ["seed=1"]),
        (["y=4"], "y=4", []),
        (["sampler.window=64", "--model", "M", "e=mc2", "seed=1"], "e=mc2",
         ["sampler.window=64", "seed=1"]),
        ([], "", []),
        (["smapler.window=64"], "", ["smapler.window=64"]),  # nearly a key: refused as one
    ],
)  # fmt: skip
def test_a_prompt_stands_anywhere_and_is_no_key_of_a_job(words, prompt, overrides):
    args = parse(["sample", "image", *words])
    assert (args.modality, args.prompt, args.overrides) == ("image", prompt, overrides)


def test_run_takes_overrides_on_either_side_of_a_flag(capsys):
    Path("a.yaml").write_text("modality: toy\nprompts: [x]\n")
    code, out, _ = gen(capsys, "run", "a.yaml", "seed=1", "--dry-run", "num_samples=3")
    assert code == 0 and "3" in out and not Path("out").exists()
    assert gen(capsys, "run", "a.yaml", "seed=1", "num_samples=3")[0] == 0
    assert [r["seed"] for r in read_rows(Path("out/a"))] == [1, 2, 3]
    assert "seed: was 1, now 2" in refused(capsys, "run", "a.yaml", "seed=2", "num_samples=3")
    assert "seed: was 1" in refused(capsys, "run", "a.yaml", "--dry-run")


def test_a_dry_run_checks_the_prompts(capsys):
    Path("a.yaml").write_text("modality: toy\nprompts: [x, y!]\n")
    assert "holds '!'" in refused(capsys, "run", "a.yaml", "--dry-run")


def test_status_gallery_and_check_of_a_folder(capsys):
    gen(capsys, "sample", "toy", "x", "--out", "o", "--num-samples", "2")
    report = json.loads(gen(capsys, "status", "o", "--json")[1])
    assert (report["items"], report["ok"], report["failed"], report["pending"]) == (2, 2, 0, 0)
    Path("o/index.html").unlink()
    assert gen(capsys, "gallery", "o")[1] == "o/index.html\n" and Path("o/index.html").exists()
    code, out, _ = gen(capsys, "check", "o", "--json")
    assert code == 0 and json.loads(out)["passed"] == 1
    Path("o/000001-x-s1.txt").unlink()
    code, out, _ = gen(capsys, "check", "o")
    assert code == 1 and "50.0%" in out and "missing" in out


# --- telling


@pytest.mark.parametrize(
    "kind", ["samplers", "presets", "tokenizers", "modalities", "models", "configs"]
)
def test_every_list_is_readable_by_people_and_programs(capsys, kind):
    table = json.loads(gen(capsys, "ls", kind, "--json")[1])
    text = gen(capsys, "ls", kind)[1]
    assert table and all(row["name"] in text for row in table)


def test_samplers_are_listed_with_guarantee_protocol_parameters_and_purpose(capsys):
    rows = {r["name"]: r for r in json.loads(gen(capsys, "ls", "samplers", "--json")[1])}
    row = rows["speculative_jacobi"]
    assert (row["guarantee"], row["protocol"], row["params"]["window"]) == (
        "same_tokens",
        "causal",
        64,
    ) and row["about"]
    assert rows["masked_iterative"]["guarantee"] == "approximate"
    presets = {r["name"]: r for r in json.loads(gen(capsys, "ls", "presets", "--json")[1])}
    beside = {p["name"]: (name, p) for name, row in rows.items() for p in row["presets"]}
    assert set(beside) == set(presets) and all(
        presets[n]["sampler"] == family for n, (family, _) in beside.items()
    )
    assert all(
        p["guarantee"] == presets[n]["guarantee"] and p["reference"] == rows[family]["reference"]
        for n, (family, p) in beside.items()
    )
    assert (beside["fast_dllm"][0], beside["fast_dllm"][1]["paper"]) == (
        "masked_iterative",
        "2505.22618",
    )


def test_show_prints_a_config_that_loads_and_its_fingerprint(capsys):
    code, out, _ = gen(capsys, "show", "image/sjd", "seed=4")
    Path("shown.yaml").write_text(out)
    again = gen(capsys, "show", "shown.yaml")[1]
    assert code == 0 and "seed: 4" in out and out.splitlines()[-1] == again.splitlines()[-1]
    assert re.fullmatch(r"# fingerprint: [0-9a-f]{64}", out.splitlines()[-1])


def test_cp_copies_once_and_never_overwrites(capsys):
    assert gen(capsys, "cp", "image/sjd", "mine.yaml")[:2] == (0, "mine.yaml\n")
    before = Path("mine.yaml").read_bytes()
    assert "exists" in refused(capsys, "cp", "image/halton", "mine.yaml")
    assert Path("mine.yaml").read_bytes() == before
    assert gen(capsys, "cp", "image/sjd", ".")[1] == "sjd.yaml\n"


def test_no_argument_and_help_and_version_are_code_0(capsys):
    assert "sample" in gen(capsys)[1] and gen(capsys)[0] == 0
    assert gen(capsys, "sample", "--help")[0] == 0 and gen(capsys, "--version")[1].startswith(
        "gen "
    )


def test_help_and_lists_of_configs_import_nothing_heavy():
    code = (
        "import sys; from gen.__main__ import main; main(['--help']); main(['ls', 'configs']); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'yaml', 'numpy')))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode
        == 0
    )


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(
        [f"{sys.executable} -m gen ls configs --json | true"],
        shell=True,
        capture_output=True,
        timeout=60,
    )
    assert b"Traceback" not in done.stderr and b"gen:" not in done.stderr


def test_both_entry_points_leave_with_the_code():
    done = subprocess.run(
        [sys.executable, "-m", "gen", "smple"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    script = Path(sys.executable).with_name("gen")
    if script.exists():
        assert subprocess.run([script, "smple"], capture_output=True, timeout=60).returncode == 2


# --- bench


def test_bench_measures_everything_against_autoregression(capsys):
    code, out, _ = gen(
        capsys,
        "bench",
        "toy",
        "--samplers",
        "sjd,scd_mc",
        "--batch-sizes",
        "1,2",
        "--prompts",
        "3",
        "--repeats",
        "2",
        "--sweep",
        "window=4,8",
        "--gallery",
        "curves",
        "--out",
        "b.json",
        "--markdown",
    )
    report = json.loads(Path("b.json").read_text())
    assert (
        code == 0
        and out.startswith("| sampler |")
        and len(out.splitlines()) == 2 + 5 * 2 + 2 + 1 + 3  # the device, and two columns of noise
        and out.count("-: 2 of 3 repeats that a time needs (") == 2
        and "sampling: top_k 7" in out
    )
    page = Path("curves/index.html").read_text()
    assert (
        page.count("<svg") == (2 + 2 + 1) * 2
        and page.count("<circle") == (4 + 4 + 5) * 2
        and page.count('class="param"') >= 2 * 2
    )
    assert page.count("</i>autoregressive: 12.0 passes") == 2
    rows = {(r["sampler"], r["batch_size"]): r for r in report["table"]}
    assert set(n for n, _ in rows) == {
        "autoregressive",
        "sjd window=4",
        "sjd window=8",
        "scd_mc window=4",
        "scd_mc window=8",
    }
    assert [r["batch_size"] for r in report["table"]] == [1] * 5 + [2] * 5 and out.splitlines()[
        2
    ].startswith("| autoregressive | 1 |")
    assert (
        rows["autoregressive", 1]["fewer_passes"] == 1
        and rows["sjd window=4", 2]["fewer_passes"] == 4
    )
    assert (
        rows["sjd window=4", 2]["media"] == 6
        and rows["sjd window=4", 2]["passed"] == 1
        and len(report["runs"]) == 2 * 5 * 2
    )
    order = [r["sampler"] for r in report["runs"] if r["batch_size"] == 1]
    assert order[:5] != order[5:] and set(order[:5]) == set(order[5:])


def test_bench_leaves_out_what_the_modality_has_no_model_for_unless_asked(capsys):
    code, out, _ = gen(
        capsys, "bench", "toy", "--batch-sizes", "1", "--prompts", "1", "--repeats", "1"
    )
    assert code == 0 and "scd_mc" in out and "maskgit" not in out
    assert (
        "maskgit"
        in gen(capsys, "bench", "toy", "--samplers", "maskgit", "--prompts", "1", "--repeats", "1")[
            1
        ]
    )


def test_bench_reports_the_sizes_that_do_not_fit(capsys, monkeypatch):
    plain = Pipe.generate

    def small(self, items, *args, **kwargs):
        if len(items) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return plain(self, items, *args, **kwargs)

    monkeypatch.setattr(Pipe, "generate", small)
    code, out, _ = gen(
        capsys,
        "bench",
        "toy",
        "--samplers",
        "sjd",
        "--batch-sizes",
        "1,2",
        "--prompts",
        "2",
        "--repeats",
        "1",
    )
    assert code == 0 and out.count("out of memory") == 2 and "4.00x" in out


def test_bench_takes_its_prompts_from_packaged_configs_if_the_modality_has_none():
    class Wordless(Toy):
        name = "wordless"
        example_prompts = Modality.example_prompts  # which raises

    assert (
        RING in bench.prompts_of(Wordless(), "image", 9, 0)
        and len(bench.prompts_of(Wordless(), "image", 9, 0)) == 9
    )
    with pytest.raises(GenError, match="no prompts"):
        bench.prompts_of(Wordless(), "nothing", 1, 0)


def test_a_folder_that_may_not_be_written_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(
        os,
        "replace",
        lambda a, b: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied")),
    )
    assert re.search(
        "cannot write out/toy/x-[0-9a-f]{6}/config.yaml: Permission denied",
        refused(capsys, "sample", "toy", "x"),
    )
