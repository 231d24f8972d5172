"""Features come from any module, and equal what the module computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaljob import write_job

from gen.core.errors import GenError
from gen.eval.features import load_features
from gen.eval.metric import parse_metrics
from gen.eval.run import evaluate
from gen.media.audio import write_wav

CPU = torch.device("cpu")
FILE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
    def forward(self, x):
        return self.drop(x.float().flatten(2).mean(-1))

net = Net()

def patches(x):
    return x.double().flatten(2)

def broken(x):
    return x.float().flatten(1) / 0
"""


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8, generator=generator))


def test_classes_modules_and_functions_are_called_on_batches(tmp_path, images):
    file = tmp_path / "feat.py"
    file.write_text(FILE)
    means = torch.stack(images).float().flatten(2).mean(-1)
    for name in ("Net", "net"):  # in evaluation mode: nothing is dropped
        found = load_features(f"{file}:{name}", CPU, "fid.features")(images)
        assert torch.equal(found, means)
    many = load_features(f"{file}:patches", CPU, "fid.features")(images)
    assert many.shape == (9, 64) and many.dtype == torch.float64
    installed = load_features("torch.nn:Flatten", CPU, "fid.features")(images)
    assert torch.equal(installed, torch.stack(images).flatten(1).float())
    with pytest.raises(GenError, match="fid.features returned NaN or inf"):
        load_features(f"{file}:broken", CPU, "fid.features")(images)


def test_torchscript_files_are_modules(tmp_path, images):
    path = tmp_path / "flat.pt"
    torch.jit.script(torch.nn.Flatten()).save(str(path))
    found = load_features(str(path), CPU, "fid.features")(images)
    assert torch.equal(found, torch.stack(images).flatten(1).float())


def test_checkpoints_of_transformers_give_their_pooled_output(tmp_path, images):
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(image_size=8, patch_size=4, **size)).eval()
    model.save_pretrained(tmp_path)
    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    processor.save_pretrained(tmp_path)
    found = load_features(str(tmp_path), CPU, "fid.features")(images)
    with torch.inference_mode():
        expected = model(**processor(images=images, return_tensors="pt")).pooler_output
    assert torch.allclose(found, expected, atol=1e-6) and found.std() > 0


def test_audio_checkpoints_take_waves_at_their_own_rate(tmp_path):
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

    folder = tmp_path / "model"
    torch.manual_seed(0)
    layers = dict(conv_dim=(8,), conv_stride=(4,), conv_kernel=(4,), num_feat_extract_layers=1)
    size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    positions = dict(num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    model = Wav2Vec2Model(Wav2Vec2Config(**layers, **size, **positions)).eval()
    model.save_pretrained(folder)
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=8000)
    extractor.save_pretrained(folder)
    features = load_features(str(folder), CPU, "fad.features")
    waves = torch.sin(torch.arange(64.0) * torch.tensor([[0.1], [0.3]]))
    with torch.inference_mode():
        inputs = extractor(list(waves.numpy()), sampling_rate=8000, return_tensors="pt")
        expected = model(**inputs).last_hidden_state.mean(1)
    assert features.rate == 8000
    assert torch.allclose(features(list(waves)), expected, atol=1e-6)
    job = write_job(
        tmp_path / "job",
        lambda i, path: write_wav(path, waves[i % 2], 8000),
        4,
        modality="speech",
        extension="wav",
    )
    settings = [f"fad.features={folder}"]
    found = evaluate(job, parse_metrics("fad", settings), reference=job)["metrics"]["fad"]
    assert abs(found["scores"]["fad"]) < 1e-6
    with pytest.raises(GenError, match=r"fad.rate is 16000; expected 8000, the rate of "):
        evaluate(job, parse_metrics("fad", [*settings, "fad.rate=16000"]), reference=job)


def test_images_of_several_sizes_are_measured_in_batches_of_one_size(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    sizes = [(2, 2), (2, 2), (3, 2), (2, 2), (4, 4)]
    pixels = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    job = write_job(
        tmp_path / "job", lambda i, path: Image.fromarray(pixels[i]).save(path), 5, shard_items=5
    )
    file = tmp_path / "feat.py"
    file.write_text(FILE)
    metrics = parse_metrics("fid", [f"fid.features={file}:net"])
    found = evaluate(job, metrics, reference=job)["metrics"]["fid"]
    assert found["items"] == 5 and abs(found["scores"]["fid"]) < 1e-6
