"""The list of what a foreign file can do (``gen.core.trust.POWERS``): each needs a word of its own,
wherever the file is read."""

from __future__ import annotations

import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_folders import causal
from powers import INPUTS, Canary

from gen.__main__ import main
from gen.config.job import load_config
from gen.config.layers import read_yaml
from gen.core import trust
from gen.core.errors import GenError
from gen.jobs.run import join_job
from gen.models.load.saved import RECORD, read_saved

REFUSED = {p.name: "--trust-job" if p.word else "expected a value that does" for p in trust.POWERS}
CASES = [(name, text) for name, texts in INPUTS.items() for text in texts]


@pytest.fixture
def place(tmp_path):
    """A folder with code that leaves a canary when it runs, and a function that writes a job."""
    canary, own = tmp_path / "canary", tmp_path / "own.py"
    own.write_text(f"open({str(canary)!r}, 'w')\ndef reward(media, prompt):\n    return 1.0\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "own.py").write_text(own.read_text())
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    pickled = tmp_path / "own.pkl"
    pickled.write_bytes(pickle.dumps(Canary(canary)))

    def write(text: str):
        paths = {"CANARY": canary, "OWN.py": own, "MODEL": model, "PICKLE": pickled}
        for word, path in paths.items():
            text = text.replace(word, str(path))
        text = text.replace("ADDRESS", "http://127.0.0.1:9/a.json")
        path, rows = tmp_path / "job.yaml", "prompts: ['sort 3 1 2 =']\n"
        rows = "" if "prompts_dataset" in text else rows
        path.write_text(f"modality: text\n{rows}out: {tmp_path / 'o'}\n{text}")
        return path

    return canary, write


def test_every_power_of_the_list_has_inputs():
    assert {power.name for power in trust.POWERS} == INPUTS.keys()


@pytest.mark.parametrize("power", trust.POWERS, ids=lambda power: power.name)
def test_every_power_names_the_module_that_acts_and_the_word_that_allows_it(place, power):
    """A word is enough for the list itself; what no word allows stays refused."""
    assert import_module(power.acts)
    for text in INPUTS[power.name]:
        tree = read_yaml(place[1](text))
        if power.word:
            trust.refuse_untrusted(tree, "a file", trusted=True)
        else:
            with pytest.raises(GenError, match="expected a value that does not"):
                trust.refuse_untrusted(tree, "a file", trusted=True)


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_foreign_job_file_is_refused_by_name_in_every_command(place, name, text, capsys):
    canary, write = place
    path = write(text)
    for command in (["run", str(path)], ["run", str(path), "--dry-run"], ["show", str(path)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert REFUSED[name] in said and "\n" not in said.strip(), said
    with pytest.raises(GenError, match=REFUSED[name]):
        load_config(path)
    assert not canary.exists() and not (path.parent / "o").exists()


@pytest.mark.parametrize(("name", "text"), [c for c in CASES if "jobs:" not in c[1]])
def test_a_foreign_job_folder_is_refused_before_a_worker_begins(place, name, text):
    canary, write = place
    folder = write(text).parent
    (folder / "config.yaml").write_text((folder / "job.yaml").read_text())
    (folder / "plan.json").write_text("{}")
    with pytest.raises(GenError, match=REFUSED[name]):
        join_job(folder)
    next_obstacle = "reads pickles" if name == "pickles" else "plan.json"
    with pytest.raises(GenError, match=next_obstacle):
        join_job(folder, trust_job=True)
    assert not canary.exists()


@pytest.mark.parametrize("options", [{"trust_remote_code": True}, {"attn_implementation": "a/b"}])
def test_the_record_of_a_saved_pipeline_is_held_to_the_list(tmp_path, options):
    tree = {"modality": "text", "model": "m", "dtype": "float32", "options": {}, "paths": []}
    (tmp_path / RECORD).write_text(json.dumps(tree))
    assert read_saved(tmp_path).options == {}
    (tmp_path / RECORD).write_text(json.dumps({**tree, "options": options}))
    with pytest.raises(GenError, match="gen_pipeline.json"):
        read_saved(tmp_path)


# --- pickles: no value asks for them, and no word allows them


def pickles(place: Path, canary: Path) -> dict[str, str]:
    """Write files with a pickle that makes a file, where jobs have them read; return the jobs."""
    model, good, adapter = place / "foreign", place / "good", place / "adapter"
    causal(model)
    causal(good)
    (model / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Canary(canary)}, model / "pytorch_model.bin")
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    torch.save({"a": Canary(canary)}, adapter / "adapter_model.bin")
    np.savez(place / "seen.npz", **{"observation.state": np.array([Canary(canary)], object)})
    prompts = "modality: text\nprompts: ['sort 3 1 2 =']\n"
    return {
        "weights": f"{prompts}model: {model}",
        "weights of an adapter": f"{prompts}model: {good}\nmodel_options: {{adapters: {adapter}}}",
        "weights of a draft model": f"{prompts}model: {good}\n"
        f"sampler: {{name: speculative, draft_model: {model}}}",
        "an observation": "modality: action\nsampler: autoregressive\n"
        f"prompts: [{{observation: {place / 'seen.npz'}}}]",
        "a data set": "modality: text\n"
        f"prompts_dataset: {{path: pandas, data_files: {place / 'own.pkl'}}}",
    }


def test_no_word_has_a_pickle_read(place, capsys):
    canary, write = place
    folder = write("").parent
    for name, text in pickles(folder, canary).items():
        path = folder / "foreign.yaml"
        path.write_text(f"{text}\nout: {folder / name}\n")
        assert main(["run", str(path), "--trust-job"]) in (1, 2), name
        said = capsys.readouterr().err
        assert "pickle" in said and "weights_only" not in said, (name, said)
        assert not canary.exists(), name


def test_without_its_guard_a_pickle_runs(tmp_path):
    torch.save({"a": Canary(tmp_path / "canary")}, tmp_path / "a.bin")
    torch.load(tmp_path / "a.bin", weights_only=False)
    assert (tmp_path / "canary").exists()


# --- controls: a broken guard is seen


class Listener(BaseHTTPRequestHandler):
    """Server that notes that somebody asked."""

    asked: list[str] = []

    def do_GET(self) -> None:
        """Note a request, and answer that there is nothing."""
        self.asked.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.slow
def test_an_address_is_asked_without_its_guard_alone(place, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    server = HTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        path = place[1](INPUTS["addresses"][0])
        path.write_text(path.read_text().replace(":9/", f":{server.server_port}/"))
        assert main(["show", str(path)]) == 2 and not Listener.asked
        kept = [p for p in trust.POWERS if p.name != "addresses"]
        monkeypatch.setattr(trust, "POWERS", tuple(kept))
        assert main(["show", str(path)]) == 2 and Listener.asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_code_consults_the_list(place, monkeypatch):
    """The control: with a power off the list, its code runs, and the canary shows it."""
    canary, write = place
    path = write(INPUTS["import paths"][0])
    kept = [p for p in trust.POWERS if p.name != "import paths"]
    monkeypatch.setattr(trust, "POWERS", tuple(kept))
    main(["run", str(path)])
    assert canary.exists()
