"""CLIPScore, WER, exact match and GenEval over job folders equal their definitions."""

from __future__ import annotations

import json
from pathlib import Path

import jiwer
import numpy as np
import pytest
import torch
from evaljob import write_job
from PIL import Image

from gen.eval.geneval import write_geneval
from gen.eval.metric import parse_metrics
from gen.eval.readers import read_wave
from gen.eval.run import evaluate
from gen.media.audio import write_wav

PROMPTS = ("a red circle", "a blue ring in the centre", "a green cross", "a red square")
WORDS = ("w1 w20", "w7 w3 w41", "w50", "w12 w12 w33 w2")  # of the tiny tokenizer


def result(folder, name, *settings, **keys):
    return evaluate(folder, parse_metrics(name, settings), **keys)["metrics"][name]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """The folder of a tiny random CLIP in the published layout."""
    from published import tiny_tokenizer
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    folder = tmp_path_factory.mktemp("clip")
    size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(
            text_config={**size, "vocab_size": 64, "eos_token_id": 2, "projection_dim": 8},
            vision_config={**size, "image_size": 16, "patch_size": 8, "projection_dim": 8},
            projection_dim=8,
        )
    )
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)
    CLIPProcessor(images, tiny_tokenizer()).save_pretrained(folder)
    return folder


def test_clip_score_equals_torchmetrics(tmp_path, clip):
    from torchmetrics.multimodal.clip_score import CLIPScore
    from transformers import AutoProcessor, CLIPModel

    from gen.eval.metrics.clip_score import Embeddings

    images = np.random.default_rng(0).integers(0, 256, (10, 20, 20, 3), dtype=np.uint8)
    job = write_job(
        tmp_path / "job",
        lambda i, path: Image.fromarray(images[i]).save(path),
        10,
        prompts=WORDS,
        shard_items=4,
        model="somebody/published",
    )
    found = result(job, "clip_score", f"clip_score.model={clip}", "clip_score.batch_size=3")
    model, processor = CLIPModel.from_pretrained(clip), AutoProcessor.from_pretrained(clip)
    score = CLIPScore(lambda: (Embeddings(model), processor))
    planes = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    texts = [WORDS[i % 4] for i in range(10)]
    expected = float(score(planes, texts))
    assert found["items"] == 10
    assert found["scores"]["clip_score"] == pytest.approx(expected, abs=1e-4) and expected != 0
    with torch.inference_mode():  # and its formula, without torchmetrics
        inputs = processor(text=texts, images=planes, return_tensors="pt", padding=True)
        out = model(**inputs)
        cosines = (out.image_embeds * out.text_embeds).sum(-1)
        assert not torch.allclose(out.text_embeds[0], out.text_embeds[1])
    assert found["scores"]["clip_score"] == pytest.approx(float(100 * cosines.mean()), abs=1e-4)


def test_clip_score_of_a_job_of_a_published_layout_equals_torchmetrics(tmp_path, clip):
    import families
    from torchmetrics.multimodal.clip_score import CLIPScore
    from transformers import AutoProcessor, CLIPModel

    import gen
    from gen.eval.check import check_folder
    from gen.eval.metrics.clip_score import Embeddings

    (tmp_path / "model").mkdir()
    case = families.WRITERS["llamagen:captions"](tmp_path / "model")
    pipe = gen.load("image", model=case.path, **case.options)
    out = pipe(list(case.prompts), "autoregressive", num_samples=2)
    job = tmp_path / "job"
    out.save(job)
    assert sum(check_folder(job)["unjudged"].values()) == 4
    found = result(job, "clip_score", f"clip_score.model={clip}")
    model, processor = CLIPModel.from_pretrained(clip), AutoProcessor.from_pretrained(clip)
    planes = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in out.media]
    texts = [item.prompt for item in out.items]
    expected = float(CLIPScore(lambda: (Embeddings(model), processor))(planes, texts))
    assert found["items"] == 4
    assert found["scores"]["clip_score"] == pytest.approx(expected, abs=1e-4)


ASR = """
def scripted(wave, rate):
    words = ["one two three", "one too three", "", "One, three!"]
    return words[round(float(wave[0]) * 10)]
"""


def test_wer_with_a_scripted_recogniser_equals_jiwer(tmp_path):
    heard = ["one two three", "one too three", "", "One, three!"]
    (tmp_path / "asr.py").write_text(ASR)
    job = write_job(
        tmp_path / "job",
        lambda i, path: write_wav(path, [(i % 4) / 10, 0.0, 0.1], 8000),
        7,
        modality="speech",
        extension="wav",
        prompts=("one two three", "one two", "three two one"),
        shard_items=2,
    )
    said = [("one two three", "one two", "three two one")[i % 3] for i in range(7)]
    spoken = [heard[i % 4] for i in range(7)]
    settings = f"wer.asr={tmp_path / 'asr.py'}:scripted"
    plain = result(job, "wer", settings, "wer.normalize=none")["scores"]
    assert plain == {"wer": jiwer.wer(said, spoken), "cer": jiwer.cer(said, spoken)}
    normal = [s.lower().replace(",", "").replace("!", "") for s in spoken]
    words = result(job, "wer", settings)["scores"]
    assert words == {"wer": jiwer.wer(said, normal), "cer": jiwer.cer(said, normal)}
    assert words != plain


def text_job(folder, texts, **keys):
    return write_job(
        folder,
        lambda i, path: path.write_text(texts[i], encoding="utf-8"),
        len(texts),
        modality="text",
        extension="txt",
        **keys,
    )


def write_whisper(folder: Path) -> Path:
    """Write a tiny random Whisper in the published layout."""
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizerFast,
    )

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<|endoftext|>", "<|startoftranscript|>", "<|transcribe|>", "<|notimestamps|>"]
    letters = {x: i for i, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(vocab=letters, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([*names, "<|0.00|>"])
    end = {f"{name}_token": names[0] for name in ("unk", "bos", "eos")}
    WhisperTokenizerFast(tokenizer_object=words, **end).save_pretrained(folder)
    parts = ("encoder_layers", "decoder_layers", "d_model", "encoder_ffn_dim", "decoder_ffn_dim")
    size = dict(zip(parts, (1, 1, 16, 16, 16), strict=True))
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    n = len(letters)
    ids = {"pad_token_id": n, "eos_token_id": n, "decoder_start_token_id": n + 1}
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            **size,
            **heads,
            **ids,
            vocab_size=n + 5,
            num_mel_bins=8,
            max_source_positions=50,
            max_target_positions=16,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )
    said = {"max_length": 8, "is_multilingual": False, "no_timestamps_token_id": n + 3}
    model.generation_config = GenerationConfig(**ids, **said)
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1, sampling_rate=16_000)
    extractor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_wer_by_a_folder_of_whisper_hears_files_at_its_own_rate(rate, tmp_path):
    folder = write_whisper(tmp_path / "whisper")
    waves = [np.sin(np.arange(rate // 4) * k / 9).astype(np.float32) for k in (1, 2)]
    job = write_job(
        tmp_path / "job",
        lambda i, path: write_wav(path, waves[i % 2], rate),
        2,
        modality="speech",
        extension="wav",
        prompts=("one two three", "one"),
    )
    metric = parse_metrics("wer", [f"wer.asr={folder}"])[0]
    model = metric.open(torch.device("cpu"))
    assert model.rate == 16_000
    files = sorted(job.glob("*.wav"))
    heard = [model.function(*read_wave(path, 16_000)) for path in files]
    assert all(isinstance(text, str) for text in heard) and any(heard)
    normal = [" ".join(jiwer.RemovePunctuation()(text.lower()).split()) for text in heard]
    found = evaluate(job, [metric])["metrics"]["wer"]
    assert found["items"] == 2
    assert found["scores"]["wer"] == pytest.approx(jiwer.wer(["one two three", "one"], normal))


def test_exact_match_compares_texts_with_the_answers_in_meta(tmp_path):
    texts = ["4", " 5\n", "the answer is 6", "Seven", "8"]
    answers = ["4", "5", "6", "seven", None]
    job = text_job(
        tmp_path / "job",
        texts,
        meta=lambda i: {"answer": answers[i]} if answers[i] else {"other": 1},
        samplers=("a", "b"),
    )
    found = result(job, "exact_match")
    assert found["scores"] == {"exact_match": 0.5} and found["items"] == 4
    assert found["skipped"] == {"its meta has no 'answer'": 1}
    assert found["by_sampler"]["a"]["scores"] == {"exact_match": 0.5}
    assert found["by_sampler"]["b"]["scores"] == {"exact_match": 0.5}
    assert result(job, "exact_match", "exact_match.ignore_case=true")["scores"] == {
        "exact_match": 0.75
    }
    pattern = "exact_match.pattern=(?:answer is )?(\\w+)$"
    assert result(job, "exact_match", pattern)["scores"] == {"exact_match": 0.75}


def geneval_job(folder, images):
    tags = ("single_object", "counting")
    return write_job(
        folder,
        lambda i, path: Image.fromarray(images[i]).save(path),
        len(images),
        prompts=PROMPTS[:2],
        meta=lambda i: {"tag": tags[i % 2], "include": [{"class": "ball", "count": i % 2 + 1}]},
        shard_items=3,
    )


def test_geneval_folders_go_out_and_verdicts_come_back_to_their_items(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (7, 4, 4, 3), dtype=np.uint8)
    job = geneval_job(tmp_path / "job", images)
    out = tmp_path / "layout"
    assert write_geneval(job, out) == {"prompts": 2, "images": 7, "broken": 0}
    assert sorted(p.name for p in out.iterdir()) == ["00000", "00001"]
    metadata = json.loads((out / "00001" / "metadata.jsonl").read_text())
    assert metadata == {
        "tag": "counting",
        "include": [{"class": "ball", "count": 2}],
        "prompt": PROMPTS[1],
    }
    # what GenEval's evaluate_images.py does, with a detector that likes three images
    liked = {0, 2, 3}
    lines = []
    for folder in sorted(out.iterdir()):
        said = json.loads((folder / "metadata.jsonl").read_text())
        for path in sorted((folder / "samples").iterdir()):
            index = next(i for i in range(7) if (np.asarray(Image.open(path)) == images[i]).all())
            lines.append(
                {
                    "filename": str(path),
                    "tag": said["tag"],
                    "prompt": said["prompt"],
                    "correct": index in liked,
                    "reason": "",
                    "metadata": json.dumps(said),
                }
            )
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = result(job, "geneval", f"geneval.results={results}")
    # items 0, 2, 4, 6 show a single object, items 1, 3, 5 a count
    assert found["scores"] == {
        "overall": pytest.approx((2 / 4 + 1 / 3) / 2),
        "correct_images": pytest.approx(3 / 7),
        "correct_prompts": 1.0,
        "tag:counting": pytest.approx(1 / 3),
        "tag:single_object": 0.5,
    }
    results.write_text("".join(json.dumps(x) + "\n" for x in lines[:-2]))  # two items unjudged
    less = result(job, "geneval", f"geneval.results={results}")
    assert less["items"] == 5 and list(less["skipped"].values()) == [2]


def test_geneval_needs_tags_and_images(tmp_path):
    from gen.core.errors import GenError

    job = text_job(tmp_path / "texts", ["a"])
    with pytest.raises(GenError, match="GenEval judges images"):
        write_geneval(job, tmp_path / "out")
    images = np.zeros((1, 2, 2, 3), np.uint8)
    plain = write_job(tmp_path / "plain", lambda i, path: Image.fromarray(images[i]).save(path), 1)
    with pytest.raises(GenError, match="has no tag in its meta"):
        write_geneval(plain, tmp_path / "out")
    (tmp_path / "bad.jsonl").write_text('{"filename": "x.png", "tag": "a", "correct": true}\n')
    job = geneval_job(tmp_path / "job", np.zeros((2, 2, 2, 3), np.uint8))
    with pytest.raises(GenError, match="line 1: filename is 'x.png'"):
        result(job, "geneval", f"geneval.results={tmp_path / 'bad.jsonl'}")
