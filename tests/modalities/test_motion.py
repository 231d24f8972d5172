"""Motion through the pipeline, the command line and jobs: ends, lengths, files, editing,
continuation; on models that the recipe makes in its quick form."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import only
from quick_models import quickly_trained
from safetensors.torch import load_file, save_file

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.core.rng import CounterRNG
from gen.core.token_space import TokenSpace
from gen.media.motion.bvh import read_bvh, write_bvh
from gen.media.motion.features import LOWER, UPPER, start_of
from gen.media.motion.skeleton import Motion
from gen.media.npz import write_npz
from gen.media.video import read_video
from gen.modalities.motion import captions as moves
from gen.modalities.motion import synth as moves_draw
from gen.modalities.motion.modality import MotionModality, placed, spans
from gen.models.targets.base import StepOutput
from gen.pipeline.lengths import draw_lengths, without_eos
from gen.recipes.motion import recipe as motion_recipe
from gen.tokenizers.motion.motion_vq import STRIDE, MotionVQ
from gen.tokenizers.motion.motion_vq_net import MotionVQVAE

PROMPTS = ["a person walks forward", "a person waves quickly with the left hand", "a person moves"]
JACOBI = {"name": "speculative_jacobi", "window": 32}
MASKGIT = {"name": "maskgit", "steps": 3}
LEGS, ARMS, ALL = 0, 1, slice(None)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return quickly_trained(motion_recipe, tmp_path_factory.mktemp("motion"))


@pytest.fixture(scope="module")
def pipes(work):
    """In double precision, where batches and windows of another size round alike enough for every
    token."""
    return {
        k: gen.load("motion", work / "zoo" / f"motion-{k}", dtype="float64")
        for k in ("causal", "masked")
    }


@pytest.fixture(scope="module")
def clip():
    return moves_draw.draw(
        moves.parse("a person walks forward slowly for eight steps"), np.random.default_rng(0)
    )


@contextlib.contextmanager
def ending_soon(pipe):
    """Untrained models hardly ever end: the end gets likelier, and on a canvas the later the
    more."""
    model, binding, _ = pipe.bound(pipe.model)

    def tilt(module, args, out):
        rising = torch.linspace(-2, 6, out.logits.shape[1], dtype=out.logits.dtype)
        out.logits[..., binding.space.eos_token_id] += 2.5 if model.config.causal else rising

    hook = model.register_forward_hook(tilt)
    try:
        yield binding.space.eos_token_id
    finally:
        hook.remove()


def ends(tokens, end: int) -> list[int]:
    """Tokens of every row before its end."""
    return (tokens != end).long().cumprod(1).sum(1).tolist()


def same(a: Motion, b: Motion) -> bool:
    return np.array_equal(a.root, b.root) and np.array_equal(a.rotations, b.rotations)


def codes_of(pipe, motion: Motion) -> torch.Tensor:
    """The tokens of a whole clip: [frames, parts]."""
    frontend = pipe.frontend()
    ids = frontend.encode(
        frontend.preprocess(motion.cut(0, (motion.frames - 1) // STRIDE * STRIDE + 1))[None]
    )[0].T
    return ids + torch.tensor([0, motion_recipe.CODES])


# --- where rows end


def test_jacobi_gives_the_tokens_of_autoregression_where_rows_end_apart(pipes):
    pipe = pipes["causal"]
    with ending_soon(pipe) as end:
        plain, jacobi = (
            pipe(PROMPTS, s, seed=1, num_samples=2) for s in ("autoregressive", JACOBI)
        )
        other = pipe(PROMPTS, JACOBI, seed=11, num_samples=2)
    assert len(set(ends(plain.tokens, end))) > 3
    assert torch.equal(plain.tokens, jacobi.tokens) and all(map(same, plain.media, jacobi.media))
    assert [m.frames for m in plain.media] == [n // 2 * STRIDE for n in ends(plain.tokens, end)]
    assert sum(s.nfe for s in jacobi.stats) < sum(s.nfe for s in plain.stats)
    assert not torch.equal(plain.tokens, other.tokens)  # control


@pytest.mark.parametrize("name", ["autoregressive", "speculative_jacobi", "speculative"])
def test_rows_end_between_frames(name, pipes):
    pipe = pipes["causal"]
    (sampler, sampling), items, whole = (
        pipe.resolve(name, None),
        pipe.plan(PROMPTS, 4, seed=0),
        pipe.bound(pipe.model)[1].space,
    )

    def lengths(space):
        draft = (
            pipe.target(sampler, sampling, items, pipe.draft_names(sampler)[0], space=space)
            if sampler.drafted
            else None
        )
        out = sampler(
            pipe.target(sampler, sampling, items, space=space),
            CounterRNG([pipe.draw_key(i) for i in items]),
            draft=draft,
        )
        return ends(out.tokens, space.eos_token_id)

    with ending_soon(pipe):
        kept, broken = lengths(whole), lengths(replace(whole, constraint=None))
    assert all(n % 2 == 0 and n >= 16 for n in kept) and min(kept) < 98
    assert any(n % 2 for n in broken)  # control: without the rule


# --- lengths


class Known:
    """A masked target with a table of how likely it is that a row has ended at a frame. The other
    stream lies about it."""

    def __init__(self, ended):
        frames = len(ended)
        legal = torch.zeros(2 * frames, 6, dtype=torch.bool)
        legal[:, :5] = True
        self.space = TokenSpace((frames, 2), 6, legal, mask_token_id=5, eos_token_id=4)
        p = torch.full((2 * frames,), 0.99, dtype=torch.float64)
        p[::2] = torch.tensor(ended, dtype=torch.float64)
        self.sampling = torch.cat(
            [((1 - p) / 4)[:, None].expand(-1, 4), p[:, None], torch.zeros(len(p), 1)], 1
        ).log()

    def predict(self, canvas, of):
        return StepOutput(self.sampling.expand(len(canvas), -1, -1), 7, 7)


def test_lengths_follow_the_distribution_of_the_end_and_the_seed_alone():
    target, keys = Known([0.0, 0.0, 0.1, 0.4, 0.3, 0.7]), range(4000)

    def of(keys):
        return draw_lengths(target, CounterRNG(list(keys)), target.space.empty(len(keys)))

    canvas, positions = of(keys)
    found = torch.tensor(ends(canvas, 4))
    share = torch.bincount(found // 2, minlength=7) / len(keys)

    def off(sampling):
        return float((share - torch.tensor(sampling)).abs().max())

    assert positions == [(7, 7)] * 4000 and bool((found % 2 == 0).all())
    assert (
        off([0, 0, 0.1, 0.3, 0, 0.3, 0.3]) < 0.03
    )  # what has ended stays so: 0.4 is not taken back by 0.3
    assert (
        off([0, 0.1, 0.3, 0, 0.3, 0.3, 0]) > 0.1 and off([0, 0, 0.1, 0.4, 0.3, 0.2, 0]) > 0.1
    )  # controls: a frame off; no such distribution
    assert torch.equal(canvas[7:9], of(range(7, 9))[0])
    assert not torch.equal(canvas, of(range(4000, 8000))[0])
    given = target.space.empty(4000)
    given[:, :6] = 1
    after, _ = draw_lengths(target, CounterRNG(list(keys)), given)
    assert (
        bool((after[:, :6] == 1).all())
        and abs(float((after[:, 6] == 4).double().mean()) - 0.4) < 0.03
    )
    assert not bool(without_eos(target.space).legal[:, 4].any()) and bool(
        target.space.legal[:, 4].any()
    )


def test_a_masked_row_is_as_long_as_was_drawn_first_in_any_batch_and_the_call_counts(pipes):
    pipe = pipes["masked"]
    with ending_soon(pipe) as end:
        out, alone, again = (
            pipe(PROMPTS, MASKGIT, num_samples=3, seed=2, batch_size=b) for b in (9, 1, 9)
        )
        other = pipe(PROMPTS, MASKGIT, num_samples=3, seed=12)
        fixed = pipe(PROMPTS, MASKGIT, seed=2, frames=64)
    lengths = ends(out.tokens, end)
    assert torch.equal(out.tokens, alone.tokens) and torch.equal(out.tokens, again.tokens)
    assert (
        len(set(lengths)) > 3
        and all(n % 2 == 0 and n >= 16 for n in lengths)
        and lengths != ends(other.tokens, end)
    )
    assert [(t == end).sum() for t in out.tokens] == [
        98 - n for n in lengths
    ]  # none before the end
    assert [m.frames for m in out.media] == [2 * n for n in lengths]
    assert [(s.nfe, s.tokens) for s in out.stats] == [(4, n) for n in lengths]
    assert all(s.mean_acceptance_length == s.tokens / s.nfe for s in out.stats)
    assert [(s.nfe, s.tokens) for s in fixed.stats] == [(3, 32)] * 3


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        ("causal", "autoregressive"),
        ("causal", JACOBI),
        ("causal", "speculative"),
        ("masked", MASKGIT),
    ],
)
@pytest.mark.parametrize("frames", [32, 60, 196])
@pytest.mark.thinned(3)
def test_frames_say_how_long_results_are(kind, sampler, frames, pipes):
    with ending_soon(pipes[kind]) as end:
        out = pipes[kind](PROMPTS[:2], sampler, frames=frames)
    assert [m.frames for m in out.media] == [frames] * 2
    assert ends(out.tokens, end) == [frames // 2] * 2 and out.tokens.shape == (2, 98)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_lengths_that_cannot_be_are_refused(kind, pipes):
    sampler = MASKGIT if kind == "masked" else "autoregressive"
    for frames, words in (
        *((n, f"frames is {n}; expected a multiple of 4 from 32 to 196") for n in (30, 28, 200)),
        *((n, "expected an integer of at least 1") for n in (0, 40.0, "40", True)),
    ):
        with pytest.raises(GenError, match=words):
            pipes[kind](PROMPTS[0], sampler, frames=frames)
    with pytest.raises(GenError, match="media of modality 'image' have one length; frames is 40"):
        gen.load("image")("a red circle", frames=40)


# --- files


def test_a_command_writes_three_files_per_motion_and_the_same_again(work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [
        "sample",
        "motion",
        PROMPTS[1],
        "--num-samples",
        "2",
        "--frames",
        "32",
        "--model",
        str(model := work / "zoo" / "motion-causal"),
        "--out",
    ]
    assert [main([*command, out]) for out in ("A", "B")] == [0, 0]
    next(Path("A").glob("*.bvh")).unlink()
    assert main([*command, "A"]) == 0  # makes it again
    rows = [json.loads(line) for line in Path("A/manifest.jsonl").read_text().splitlines()]
    files = [name for r in rows for name in (r["file"], *r["also"])]
    assert [Path(f).suffix for f in files] == [".npz", ".bvh", ".mp4"] * 2 and len(
        {Path(f).stem for f in files}
    ) == 2

    def data(folder, names):
        return [Path(folder, n).read_bytes() for n in names]

    assert data("A", files) == data("B", files) and len(data("A", files)) == 6
    assert all(
        a != b for a, b in zip(data("A", files[:3]), data("A", files[3:]), strict=True)
    )  # control
    assert all(f'src="{f}"' in Path("A/index.html").read_text() for f in files if f.endswith("mp4"))
    made = gen.load("motion", model)(PROMPTS[1], num_samples=2, frames=32).media
    for row, motion, other in zip(rows, made, made[::-1], strict=True):
        npz, bvh, mp4 = (Path("A", n) for n in (row["file"], *row["also"]))
        assert same(MotionModality().load(npz), motion) and not same(motion, other)
        with np.load(npz) as held:
            assert (
                np.array_equal(held["joints"], motion.joints)
                and held["fps"] == 20
                and held["prompt"] == PROMPTS[1]
            )

        def apart(m):
            return np.abs(read_bvh(bvh).joints - m.joints).max()

        assert apart(motion) < 1e-5 < apart(other)
        assert len(read_video(mp4)) == 32
    assert main(["check", "A"]) == 0


def test_an_edit_is_a_job_that_can_be_run_again(pipes, clip, tmp_path):
    assert (
        pipes["masked"](PROMPTS[0], MASKGIT, source=clip.cut(0, 33), span="upper 20:30", seed=3)
        .save(tmp_path / "edit")
        .is_file()
    )
    assert main(["run", str(tmp_path / "edit" / "config.yaml"), f"out={tmp_path / 'again'}"]) == 0

    def sha(name):
        return [
            json.loads(line)["sha256"]
            for line in (tmp_path / name / "manifest.jsonl").read_text().splitlines()
        ]

    assert sha("edit") == sha("again") and len(sha("edit")) == 1
    assert (
        main(
            [
                "run",
                str(tmp_path / "edit" / "config.yaml"),
                "span=lower",
                f"out={tmp_path / 'other'}",
            ]
        )
        == 0
    )  # control
    assert sha("edit") != sha("other")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "nan.npz",
            {"root": np.full((40, 3), np.nan), "rotations": np.tile(np.eye(3), (40, 22, 1, 1))},
            "not finite at frame 0",
        ),
        ("action.npz", {"action": np.zeros((16, 2), np.float32)}, "has no 'root'; it has action"),
        ("text.npz", {"root": np.array("x"), "rotations": np.array("y")}, "array of real numbers"),
        (
            "short.npz",
            {"root": np.zeros((2, 3)), "rotations": np.tile(np.eye(3), (2, 22, 1, 1))},
            "2 poses; expected at least 4",
        ),
        ("cut.npz", b"PK\x03\x04", "cannot be read as an .npz file"),
        ("a.bvh", b"no motion", "BVH"),
        ("a.wav", b"RIFF", "is not a motion file; expected an .npz or .bvh file"),
    ],
)
def test_files_and_media_that_are_no_motion_are_refused(name, content, words, pipes, tmp_path):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else write_npz(path, content)
    for medium, said in (
        (path, words),
        (np.zeros((40, 22, 3)), "expected a gen.media.motion.skeleton.Motion"),
    ):
        for start in ({"source": medium, "span": ":8"}, {"prefix": medium}):
            with pytest.raises(GenError, match=said):
                pipes["masked"](PROMPTS[0], MASKGIT, **start)


# --- editing


@pytest.mark.parametrize(
    ("span", "anew"),
    [
        ("20:60", [(slice(5, 15), ALL)]),
        ("23:57", [(slice(5, 15), ALL)]),
        ("0:1", [(0, ALL)]),
        ("upper 20:60", [(slice(5, 15), ARMS)]),
        ("lower", [(ALL, LEGS)]),
        ("40:", [(slice(10, None), ALL)]),
        (":40", [(slice(10), ALL)]),
        (":", [(ALL, ALL)]),
        ("lower :8, upper 100:112", [(slice(2), LEGS), (slice(25, 28), ARMS)]),
    ],
)
@pytest.mark.thinned(3)
def test_an_edit_keeps_every_code_outside_its_span(span, anew, pipes, clip):
    pipe, held = pipes["masked"], codes_of(pipes["masked"], clip)
    touched = torch.zeros(held.shape, dtype=torch.bool)
    for cells in anew:
        touched[cells] = True
    for sampler in (MASKGIT, {"name": "maskgit_remask", "steps": 4}):
        out = pipe(PROMPTS[1], sampler, source=clip, span=span, num_samples=2)
        made, behind = (
            out.tokens[:, : held.numel()].view(2, *held.shape),
            out.tokens[:, held.numel() :],
        )
        assert bool((made[:, ~touched] == held[~touched]).all())
        assert bool((made[:, touched] != held[touched]).any()) and not torch.equal(
            *made[:, touched]
        )
        assert bool((behind == pipe.bound(pipe.model)[1].space.eos_token_id).all())
        assert [(m.frames, s.tokens) for m, s in zip(out.media, out.stats, strict=True)] == [
            (112, int(touched.sum()))
        ] * 2
    free = (
        pipe(PROMPTS[1], MASKGIT, frames=112).tokens[:, : held.numel()].view(held.shape)
    )  # control: without the source they are others
    assert bool(touched.all()) or not torch.equal(free[~touched], held[~touched])


def test_what_is_edited_keeps_its_length_heading_and_origin(pipes, clip, tmp_path):
    pipe, edit = pipes["masked"], {"span": "upper 20:60", "seed": 4}
    here = pipe(PROMPTS[1], MASKGIT, source=clip, **edit).media[0]
    moved = pipe(PROMPTS[1], MASKGIT, source=placed(clip, 1.2, (2.0, -3.0)), **edit).media[0]

    def flat(m):
        return np.array([start_of(m)[0], *start_of(m)[1]])

    assert np.allclose(flat(moved) - flat(here), [1.2, 2.0, -3.0], atol=1e-6) and not np.allclose(
        flat(moved), flat(here)
    )
    assert np.abs(placed(here, 1.2, (2.0, -3.0)).joints - moved.joints).max() < 1e-5
    for poses in (80, 196):  # what this toolkit makes has no pose after its last code
        made = pipe(PROMPTS[0], MASKGIT, frames=poses).media[0]
        assert (
            pipe(PROMPTS[1], MASKGIT, source=made, span=f"{poses - 20}:{poses}").media[0].frames
            == poses
        )
    MotionModality().save(clip, tmp_path / "a.npz", {})
    write_bvh(tmp_path / "a.bvh", clip)
    for path in (tmp_path / "a.npz", str(tmp_path / "a.npz"), tmp_path / "a.bvh"):
        again = pipe(PROMPTS[1], MASKGIT, source=path, **edit).media[0]
        assert np.abs(again.joints - here.joints).max() < 1e-5 and (
            same(again, here) or str(path).endswith("bvh")
        )


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ("arms", "'arms' names no poses"),
        ("head 20:60", "'head 20:60' names no poses"),
        ("20-60", "names no poses"),
        ("20", "names no poses"),
        ("1.5:3", "names no poses"),
        ("-3:5", "names no poses"),
        ("1:2,", "'' names no poses"),
        ("10:999", "from pose 10 to 999; expected a range inside 0:112"),
        ("20:20", "expected a range inside 0:112"),
        ("60:20", "from pose 60 to 20"),
        ("112:", "from pose 112 to 112"),
        (5, "span is 5; expected text"),
        ("  ", "expected text such as"),
    ],
)
def test_spans_that_say_nothing_are_refused(span, words, pipes, clip):
    with pytest.raises(GenError, match=words):
        pipes["masked"](PROMPTS[0], MASKGIT, source=clip, span=span)
    assert spans("upper 1:2, lower", 3).tolist() == [[True] * 3, [False, True, False]]


def test_edits_that_cannot_be_are_refused(pipes, clip):
    with pytest.raises(
        GenError, match="'autoregressive' decodes left to right and cannot edit here"
    ):
        pipes["causal"](PROMPTS[0], "autoregressive", source=clip, span=":8")
    with pytest.raises(GenError, match="'motion' is edited with a span; got a mask"):
        pipes["masked"](PROMPTS[0], MASKGIT, source=clip, mask=np.zeros((4, 4), bool))
    with pytest.raises(GenError, match="'image' is edited with a mask; got a span"):
        gen.load("image")(
            "a red circle", "maskgit", source=np.zeros((64, 64, 3), np.uint8), span="2:3"
        )
    with pytest.raises(GenError, match="20 poses; expected 32 to 196"):
        pipes["masked"](PROMPTS[0], MASKGIT, source=clip.cut(0, 20), span=":8")
    with pytest.raises(GenError, match="modality 'motion' cannot be streamed"):
        next(pipes["masked"].stream(PROMPTS[0], MASKGIT))


# --- conditions, continuation


def test_a_person_moves_is_the_prompt_that_says_nothing(pipes):
    pipe = pipes["causal"]
    binding = pipe.bound(pipe.model)[1]

    def prompt(text):
        return binding.prompt(pipe.modality.condition(text))

    assert (
        prompt("a person moves")
        == prompt(" A person  moves.")
        == binding.unconditional
        != prompt(PROMPTS[0])
    )
    guided, plain = (
        pipe("a person moves", JACOBI, **only(guidance_scale=g), frames=32).tokens
        for g in (3.0, 1.0)
    )
    assert torch.equal(guided, plain)
    with pytest.raises(GenError, match="outside the vocabulary"):
        pipe("a person flies")


@pytest.mark.parametrize(
    ("kind", "sampler"), [("causal", "autoregressive"), ("causal", JACOBI), ("masked", MASKGIT)]
)
def test_a_continued_motion_keeps_its_tokens_and_follows_them(kind, sampler, pipes, clip, tmp_path):
    pipe, known = pipes[kind], codes_of(pipes[kind], clip.cut(0, 63))[:15].flatten()
    MotionModality().save(clip.cut(0, 63), tmp_path / "a.npz", {})
    with ending_soon(pipe) as end:
        out, file = (
            pipe(PROMPTS[0], sampler, prefix=p, num_samples=4)
            for p in (clip.cut(0, 63), tmp_path / "a.npz")
        )
        fixed = pipe(PROMPTS[0], sampler, prefix=clip.cut(0, 63), frames=100)
        free = pipe(PROMPTS[0], sampler, num_samples=4)
    assert (
        len(known) == 30
        and torch.equal(out.tokens[:, :30], known.expand(4, -1))
        and torch.equal(out.tokens, file.tokens)
    )
    assert not torch.equal(free.tokens[:, :30], out.tokens[:, :30])  # control
    lengths = ends(out.tokens, end)
    assert len(set(lengths)) > 1 and all(n % 2 == 0 and n >= 30 for n in lengths)
    assert torch.equal(fixed.tokens[0, :30], known) and ends(fixed.tokens, end) == [50]
    for frames in (40, 60):
        with pytest.raises(GenError, match=f"frames is {frames}, which the prefix already fills"):
            pipe(PROMPTS[0], sampler, prefix=clip.cut(0, 63), frames=frames)
    with pytest.raises(GenError, match="49 frames of codes; expected fewer than 49"):
        pipe(PROMPTS[0], sampler, prefix=motion_recipe.follow(clip, clip).cut(0, 197))


# --- the frontend, the recipe


def test_the_codes_of_a_part_of_the_body_look_at_that_part_alone(pipes, clip):
    frontend = pipes["masked"].frontend()
    x = frontend.preprocess(clip)[None]

    def noisy(part):
        return frontend.encode(
            x.index_add(
                -1, torch.from_numpy(part), torch.randn(*x.shape[:2], len(part), dtype=x.dtype) * 3
            )
        )[0]

    legs, arms = frontend.encode(x)[0]
    assert torch.equal(noisy(UPPER)[0], legs) and not torch.equal(noisy(UPPER)[1], arms)
    assert torch.equal(noisy(LOWER)[1], arms) and not torch.equal(noisy(LOWER)[0], legs)


def test_residual_codebooks_each_take_the_nearest_of_what_is_left(clip):
    torch.manual_seed(0)
    rvq = MotionVQ(MotionVQVAE([list(range(263))], 16, 4, 8, residual=3))
    x = rvq.preprocess(clip)[None]
    codes, z = rvq.encode(x)[0], rvq.model.latents(x)[0][0]
    assert (
        codes.shape == (3, 28)
        and rvq.decode(codes[None]).shape == (1, 112, 263)
        and rvq.config.codebook_sizes == (16,) * 3
    )
    for stream, table in zip(codes, rvq.codebooks, strict=True):
        apart = (z[:, None] - table).norm(dim=-1)
        assert torch.equal(apart.gather(1, stream[:, None])[:, 0], apart.amin(1))
        z = z - table[stream]
    with pytest.raises(GenError, match="expected 0 to below 16"):
        rvq.decode(torch.full((1, 3, 2), 16))
    with pytest.raises(GenError, match="110 poses; expected 4 n or 4 n [+] 1"):
        rvq.preprocess(clip.cut(0, 110))
    with pytest.raises(ValueError, match="not each of 0 to 1 once"):
        MotionVQVAE([[0, 0]], 16, 4, 8)


def test_weights_that_lack_a_tensor_are_refused(work, tmp_path):
    whole = load_file(next((work / "zoo" / "motion-vq").glob("*.safetensors")))
    (tmp_path / "config.json").write_text((work / "zoo" / "motion-vq" / "config.json").read_text())
    save_file(
        {k: v for k, v in whole.items() if k != "tables.1"},
        tmp_path / "diffusion_pytorch_model.safetensors",
    )
    with pytest.raises(GenError, match="1 missing: tables.1"):
        MotionVQ.from_pretrained(tmp_path)


def test_training_sees_whole_frames_and_then_the_end_and_no_caption_that_is_held_out(work):
    codes = torch.load(work / "tokens.pt", weights_only=True)["codes"].long()
    lengths = ends(codes, motion_recipe.END)
    assert all(n % 2 == 0 and n >= 16 for n in lengths) and len(set(lengths)) > 3
    for row, n in zip(codes, lengths, strict=True):
        assert bool(
            (row[:n].view(-1, 2) // motion_recipe.CODES == torch.tensor([0, 1])).all()
        ) and bool((row[n:] == motion_recipe.END).all())
    hidden = {tuple(c.slots()) for c in moves.every_caption() if moves.held_out(c)}
    rng, clips = np.random.default_rng(7), motion_recipe.drawn(7)
    assert any(tuple(moves.random_caption(rng).slots()) in hidden for _ in range(60))  # control
    for motion, slots in (next(clips) for _ in range(60)):
        assert motion.frames % STRIDE == 1 and motion.frames <= motion_recipe.FRAMES * STRIDE + 1
        assert tuple(slots) not in hidden
