"""The export, read by Transformers itself, and read back."""

import dataclasses
import inspect
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, TINY, model_snapshot, succeed
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import export
from engine.config.schema import ARCHITECTURE
from engine.errors import UserError
from engine.interop import transformers as huggingface
from engine.snapshots.snapshot import Snapshot
from model import GPT, MLP, GPTConfig
from sample import SampleConfig, load_model

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# line ends, controls, spaces and marks of every kind, and characters of one to four bytes
VOCABULARY = "".join(sorted("\0\t\n\r !'0AZ_az\x7f\x85\xa0e\u0301é\u200d\u2028\u3000漢\ufeff😀\U0010ffff"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exported(request, tmp_path_factory) -> tuple[GPT, Snapshot, str]:
    """A model, its snapshot, and the directory that it was exported to."""
    snapshot = model_snapshot(VOCABULARY, **ARCHITECTURES[request.param])
    out = str(tmp_path_factory.mktemp("export") / "model")
    export.export(snapshot, "runs/small/gpt_snapshot.best.pt", out)
    return load_model(snapshot, "cpu"), snapshot, out


@pytest.fixture
def out(tmp_path) -> str:
    """Where a test exports to."""
    return str(tmp_path / "model")


# --- Transformers reads it ---


@torch.no_grad()
def test_transformers_computes_the_same_logits(exported):
    model, _, out = exported
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    idx = torch.randint(len(VOCABULARY), (5, 24), generator=torch.Generator().manual_seed(1))
    ours, got = model(idx)[0], theirs(idx).logits
    assert got.dtype == torch.float32 and ours.abs().max() > 1
    assert (got[..., :-1] - ours).abs().max() < 2e-5
    # With a cache, from which the rest is computed: Transformers' own, and one that is given.
    for cache in (theirs(idx[:, :15]).past_key_values, transformers.DynamicCache()):
        if cache.get_seq_length() == 0:
            theirs(idx[:, :15], past_key_values=cache)
        got = theirs(idx[:, 15:], past_key_values=cache).logits
        assert (got[..., :-1] - ours[:, 15:]).abs().max() < 2e-5
    assert {"labels", "logits_to_keep"} <= inspect.signature(theirs.forward).parameters.keys()
    assert theirs.config.vocab_size == len(VOCABULARY) + 1


def test_a_model_with_edited_code_is_not_exported(out, tmp_path, monkeypatch):
    snapshot = model_snapshot(VOCABULARY)
    with monkeypatch.context() as edit:
        edit.setattr(MLP, "forward", lambda self, x: self.c_proj(self.c_fc(x).sin()))
        with pytest.raises(UserError, match=r"logits differ.*was model.py changed"):
            export.export(snapshot, "x.pt", out)
    with monkeypatch.context() as edit:
        edit.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: {}["c_gate"])
        with pytest.raises(UserError, match=r"cannot load it: was model\.py changed\? 'c_gate'"):
            export.export(snapshot, "x.pt", out)
    with pytest.raises(UserError, match=r"^model\.py gives different outputs"):
        export.export(dataclasses.replace(snapshot, probe_logits=torch.ones(16, 2)), "x.pt", out)
    odd = snapshot.model_state | {"blocks.0.mlp.c_gate.weight": torch.zeros(1)}
    with pytest.raises(UserError, match=r"of another model.*c_gate"):
        export.export(dataclasses.replace(snapshot, model_state=odd), "x.pt", out)
    assert not any(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert export.export(snapshot, "x.pt", out).startswith("not compared with Transformers: ")


@torch.no_grad()
def test_the_unknown_token_is_never_the_likeliest_and_never_drawn(exported):
    _, _, out = exported
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    unknown = len(VOCABULARY)
    idx = torch.randint(unknown + 1, (64, 24), generator=torch.Generator().manual_seed(2))
    assert (theirs(idx).logits.argmax(-1) != unknown).all()
    torch.manual_seed(3)
    drawn = theirs.generate(idx[:, :1], attention_mask=torch.ones(64, 1), temperature=100.0)
    assert drawn.shape == (64, 24)  # as far as the model sees
    assert (drawn[:, 1:] != unknown).all() and len(drawn[:, 1:].unique()) > 20


def test_the_tokenizer_round_trips_and_an_unknown_character_is_one_token(exported):
    _, snapshot, out = exported
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = VOCABULARY + "".join(reversed(VOCABULARY)) + "\r\n  \n z ' z 0 e\u0301 é"
    ids = tokenizer(text)["input_ids"]
    assert ids == [snapshot.vocabulary.index(character) for character in text]
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
    strange = "字 a<unk>\x01\U0001f600\U0001f601A\ufffd\n"
    ids = tokenizer(strange)["input_ids"]
    assert tokenizer.decode(ids) == "".join(c if c in VOCABULARY else tokenizer.unk_token for c in strange)
    assert [i == tokenizer.unk_token_id for i in ids] == [c not in VOCABULARY for c in strange]


def test_a_replacement_character_in_the_vocabulary_is_kept(out):
    vocabulary = "ab\ufffd\uffff"
    export.export(model_snapshot(vocabulary), "x.pt", out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("a\ufffdb\uffff\ufffec")["input_ids"]
    assert ids == [0, 2, 1, 3, 4, 4] and tokenizer.decode(ids) == "a\ufffdb\uffff\ufffe\ufffe"
    assert huggingface.read(out)[2] == vocabulary


def test_a_byte_model_is_exported_and_imported(out):
    vocabulary = "".join(sorted({chr(byte) for byte in "A text, é漢😀\ufffd\n\0 \x7f".encode()}))
    snapshot = model_snapshot(vocabulary, "modern")
    snapshot.config["data"] = {"encoding": "bytes"}
    assert export.export(snapshot, "x.pt", out) == "Transformers gives the same logits"
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "é漢\n😀 \ufffd tex\0\x7f,A"
    ids = tokenizer(text)["input_ids"]
    assert ids == [vocabulary.index(chr(byte)) for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    assert tokenizer("tZ ")["input_ids"][1] == tokenizer.unk_token_id
    assert huggingface.read(out)[2:] == (vocabulary, "bytes")


def test_the_pipeline_works_without_any_settings_and_in_batches(exported):
    _, _, out = exported
    generator = pipeline("text-generation", out, batch_size=2, trust_remote_code=True)
    for prompt in ("A", "\n 0字"):
        text = generator(prompt)[0]["generated_text"]
        assert text.startswith(prompt) and len(text) == 24
    prompts = ["A", "zz Z z 0 e"]  # of different lengths: the shorter is padded
    settings = {"do_sample": False, "max_new_tokens": 8}
    together = [found[0]["generated_text"] for found in generator(prompts, **settings)]
    assert together == [generator(p, **settings)[0]["generated_text"] for p in prompts]


@pytest.mark.parametrize("setting", ["beams", "assisted", "static", "cropped", "flex_attention"])
def test_generation_modes_that_token_shift_does_not_support_are_refused(setting, out):
    export.export(model_snapshot(VOCABULARY, **ARCHITECTURES["shifted"]), "x.pt", out)
    arguments = {"attn_implementation": setting} if setting == "flex_attention" else {}
    idx = torch.tensor([[1, 2, 3, 1, 2, 3]])
    with pytest.raises(ValueError, match=r"token shift|stateful|does not support"):
        theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, **arguments)
        cache = transformers.DynamicCache(config=theirs.config)
        if setting == "static":
            cache = transformers.StaticCache(config=theirs.config, max_cache_len=20)
        elif setting == "cropped":
            theirs(idx, past_key_values=cache)
            cache.crop(-2)
        given = {"beams": {"num_beams": 2}, "assisted": {"prompt_lookup_num_tokens": 2}}
        given |= {"static": {"past_key_values": cache}, "cropped": {"past_key_values": cache}}
        config = transformers.GenerationConfig(max_new_tokens=3)
        theirs.generate(idx, config, **given.get(setting, {}))


# --- and back ---


def test_export_and_import_are_bitwise_inverse(exported, tmp_path):
    model, snapshot, out = exported
    again = tmp_path / "again"  # as Transformers writes it
    AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).save_pretrained(again)
    AutoTokenizer.from_pretrained(out).save_pretrained(again)
    for folder in (out, str(again)):
        config, weights, vocabulary, encoding = huggingface.read(folder)
        assert (vocabulary, encoding) == (snapshot.vocabulary, "utf-8")
        read, ours = dataclasses.asdict(GPTConfig(**config)), dataclasses.asdict(model.config)
        assert [read[name] for name in {*ARCHITECTURE, *config}] == [ours[name] for name in {*ARCHITECTURE, *config}]
        assert weights.keys() == snapshot.model_state.keys()
        assert all(torch.equal(weights[name], t) for name, t in snapshot.model_state.items())


def test_biases_that_transformers_has_trained_are_kept(out):
    trained = f"{out}-trained"
    export.export(model_snapshot(VOCABULARY, bias=False), "x.pt", out)
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    torch.nn.init.constant_(theirs.transformer.h[1].mlp.c_fc.bias, 0.5)
    theirs.save_pretrained(trained)
    AutoTokenizer.from_pretrained(out).save_pretrained(trained)
    config, weights, _, _ = huggingface.read(trained)
    assert config["bias"] and (weights["blocks.1.mlp.c_fc.bias"] == 0.5).all()


@pytest.mark.parametrize(
    "file, name, value, says",
    [
        ("config.json", "model_type", "llama", "model_type=llama: must be gpt2, nanochat, nanochat_shift"),
        ("config.json", "activation_function", "gelu_new", "activation_function=gelu_new: models of this"),
        ("config.json", "n_embd", None, "config.json: n_embd is null"),
        ("config.json", "n_layer", 10**9, "declares 1000000000 layers, and model.safetensors has fewer"),
        ("config.json", "n_inner", 64, "n_inner=64: models of this application have None"),
        ("tokenizer.json", "model", {"vocab": {"a": 0, "the": 1}, "unk_token": "u"}, "there is 'the'"),
        ("tokenizer.json", "model", {"vocab": {"X": 99}, "unk_token": "u"}, "not an exported model"),
    ],
)
def test_an_unsupported_transformers_model_is_refused(file, name, value, says, out):
    export.export(model_snapshot(VOCABULARY), "x.pt", out)
    path = Path(out, file)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(UserError, match=re.escape(says)) as error:
        huggingface.read(out)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_export_is_refused(file, out):
    export.export(model_snapshot(VOCABULARY), "x.pt", out)
    path = Path(out, file)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="not an exported model"):
        huggingface.read(out)
    path.unlink()
    with pytest.raises(UserError, match=r"not an exported model: .*o such file"):
        huggingface.read(out)


# --- the command ---


def test_the_best_snapshot_of_the_newest_run_is_exported_with_its_figures(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    best, latest = model_snapshot(VOCABULARY), model_snapshot(VOCABULARY, arch="modern")
    (run_dir / "gpt_snapshot.best.pt").write_bytes(best.to_bytes())
    (run_dir / "gpt_snapshot.pt").write_bytes(latest.to_bytes())
    (run_dir / "metrics.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    export.main(["out=model"])
    assert "gpt_snapshot.best.pt" in capsys.readouterr().out
    _, weights, _, _ = huggingface.read("model")
    assert all(torch.equal(weights[name], tensor) for name, tensor in best.model_state.items())
    card = Path("model", "README.md").read_text()
    assert "\n| snapshot | step 7, held-out loss 1.2500 (nats per character) |\n" in card
    assert "\n# small\n" in card
    assert sorted(os.listdir()) == ["model", "runs"]


def test_the_model_card_has_the_figures_of_the_run(tmp_path):
    succeed(*TINY, "trainer.snapshot_format=sharded", f"run_dir={tmp_path / 'run'}")
    out = tmp_path / "deep" / "model"
    export.main([f"run_dir={tmp_path / 'run'}", f"out={out}"])
    assert AutoModelForCausalLM.from_pretrained(out).config.n_embd == 16
    card = (out / "README.md").read_text()
    assert 'pipeline("text-generation", "model")("\\n")[0]' in card  # make lint passes beside it
    assert "None" not in card and "| text | pydoc:topics, SHA-256 " in card
    assert "| characters trained on | 1,152 |" in card  # 6 x 12 x 16


@dataclasses.dataclass
class OwnConfig(GPTConfig):
    norm: str = "usual"


def test_an_added_model_field_is_refused_unless_it_has_its_default(out, monkeypatch):
    snapshot = model_snapshot(VOCABULARY)
    model = load_model(snapshot, "cpu")
    monkeypatch.setattr(export, "load_model", lambda *_, **__: model)
    model.config = OwnConfig(**dataclasses.asdict(model.config))
    export.export(snapshot, "a.pt", out)
    model.config.norm = "mine"
    with pytest.raises(UserError, match=r"^model\.norm=mine: Transformers' models have no such setting"):
        export.export(snapshot, "a.pt", f"{out}-other")
    with pytest.raises(UserError, match=r"^a\.pt: model\.norm=mine: the page has no such setting"):
        export.page_model(snapshot, "a.pt")


@pytest.mark.parametrize("option, kind", [("token_shift", "token shift"), ("ngram_rows", "n-gram embeddings")])
def test_gpt2_with_our_additions_is_not_exported_to_transformers(option, kind, out):
    snapshot = model_snapshot(VOCABULARY, arch="gpt2", **{option: 1})
    with pytest.raises(UserError, match=f"^model.arch=gpt2 with {kind}: Transformers has no such model; page="):
        export.export(snapshot, "a.pt", out)
    assert not os.path.exists(out)


def test_a_missing_safetensors_is_named(tmp_path, monkeypatch):
    (tmp_path / "small.pt").write_bytes(model_snapshot("ab").to_bytes())
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UserError, match=r"^safetensors is missing: pip install safetensors$"):
        export.main([f"snapshot={tmp_path / 'small.pt'}", f"out={tmp_path / 'model'}"])
    assert os.listdir(tmp_path) == ["small.pt"]


# --- what is said of it ---


def test_the_files_are_for_everyone_and_the_card_counts_all_parameters(exported):
    model, _, out = exported
    assert Path(out).stat().st_mode & 0o777 == 0o755
    assert not any("engine." in code.read_text() for code in Path(out).glob("*.py"))
    count = sum(p.numel() for p in model.parameters())
    assert f"| parameters | {count:,} |" in Path(out, "README.md").read_text()


def test_public_names_contain_no_local_path():
    for path in ("/home/me/runs/mine/", "file:///home/me/mine", "zip://*::/home/me/mine"):
        assert export.public_name(path) == "mine"
    assert export.public_name("https://me:secret@host/a.txt?signature=1") == "https://***@host/a.txt?***"


@pytest.mark.parametrize(
    "arch, dropout",
    [("gpt2", {"embd_pdrop": 0.1, "resid_pdrop": 0.2, "attn_pdrop": 0.3}), ("modern", {"attention_dropout": 0.3})],
)
def test_the_exported_configuration_has_dropout_and_temperature(arch, dropout):
    config = model_snapshot(VOCABULARY, arch, embd_pdrop=0.1, resid_pdrop=0.2, attn_pdrop=0.3).model_config
    files = huggingface.json_files(config, VOCABULARY, "utf-8")
    assert dropout.items() <= files["config.json"].items()
    assert files["generation_config.json"]["temperature"] == SampleConfig.temperature
