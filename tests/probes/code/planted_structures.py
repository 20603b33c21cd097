"""Decoders and collators as users write them, each with one bug."""

import re

import torch

# Decoders: (tokenizer, completion_ids) -> text; (text) -> text ----------------------------------------------------------


def right_ids(tokenizer, ids):
    ids = list(ids)
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids.pop()
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids


def to_text(tokenizer, ids, **options):
    return tokenizer.decode(ids, **{"skip_special_tokens": False, "clean_up_tokenization_spaces": False, **options})


def answer(text):
    if "</think>" in text:
        return text.split("</think>", 1)[-1].strip()
    return "" if "<think>" in text else text


def from_ids(body):
    return lambda tokenizer, completion_ids: answer(body(tokenizer, list(completion_ids)))


def from_text(body):
    return lambda text: body(text)


def padding_kept(tokenizer, ids):
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return to_text(tokenizer, ids)


def eos_kept(tokenizer, ids):
    return to_text(tokenizer, [i for i in ids if i != tokenizer.pad_token_id])


def cut_at_first_eos(tokenizer, ids):
    ids = [i for i in ids if i != tokenizer.pad_token_id]
    return to_text(tokenizer, ids[: ids.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in ids else ids)


def every_eos_removed(tokenizer, ids):
    return to_text(tokenizer, [i for i in ids if i not in (tokenizer.pad_token_id, tokenizer.eos_token_id)])


def last_dropped(tokenizer, ids):
    return to_text(tokenizer, [i for i in ids if i != tokenizer.pad_token_id][:-1])


def cleaned(tokenizer, ids):
    text = to_text(tokenizer, right_ids(tokenizer, ids))
    for mark in (".", ",", "?", "!", "'s"):
        text = text.replace(f" {mark}", mark)
    return text


DECODERS = {
    "special_tokens_stripped": from_ids(lambda t, ids: to_text(t, ids, skip_special_tokens=True)),
    "padding_kept": from_ids(padding_kept),
    "eos_kept": from_ids(eos_kept),
    "cut_at_first_eos": from_ids(cut_at_first_eos),
    "every_eos_removed": from_ids(every_eos_removed),
    "last_token_dropped": from_ids(last_dropped),
    "spaces_cleaned_up": from_ids(cleaned),
    "unclosed_reasoning_kept": from_text(lambda x: x.split("</think>", 1)[-1].strip() if "</think>" in x else x),
    "after_last_marker": from_text(
        lambda x: x.split("</think>")[-1].strip() if "</think>" in x else ("" if "<think>" in x else x)
    ),
    "between_markers": from_text(
        lambda x: x.split("</think>")[1].strip() if "</think>" in x else ("" if "<think>" in x else x)
    ),
    "answer_not_stripped": from_text(
        lambda x: x.split("</think>", 1)[-1] if "</think>" in x else ("" if "<think>" in x else x)
    ),
    "blocks_cut_out": from_text(lambda x: re.sub(r"<think>.*?</think>", "", x, flags=re.DOTALL).strip()),
    "opening_marker_required": from_text(lambda x: answer(x) if "<think>" in x else x),
    "empty_answer_falls_back": from_text(lambda x: answer(x) or x),
    "reasoning_scored": from_text(
        lambda x: (
            x.split("</think>", 1)[0].replace("<think>", "").strip()
            if "</think>" in x
            else ("" if "<think>" in x else x)
        )
    ),
}

# Collators: (samples, pad_token_id) -> dict --------------------------------------------------------------------------------


def row(tokens, width, value, left):
    padding = [value] * (width - len(tokens))
    return padding + tokens if left else tokens + padding


def collator(change=lambda batch, samples, pad: batch, prompt_left=True, completion_left=False):
    """TRL's layout, then one thing changed."""

    def collate(samples, pad_token_id):
        prompts, completions = [s["prompt_ids"] for s in samples], [s["completion_ids"] for s in samples]
        p, c = max(map(len, prompts)), max(map(len, completions))
        batch = {
            "input_ids": [
                row(x, p, pad_token_id, prompt_left) + row(y, c, pad_token_id, completion_left)
                for x, y in zip(prompts, completions, strict=True)
            ],
            "attention_mask": [
                row([1] * len(x), p, 0, prompt_left) + row([1] * len(y), c, 0, completion_left)
                for x, y in zip(prompts, completions, strict=True)
            ],
            "loss_mask": [[0] * p + row([1] * len(y), c, 0, completion_left) for y in completions],
            "advantages": [s["advantage"] for s in samples],
            "old_logprobs": [[0.0] * p + row(list(s["logprobs"]), c, 0.0, completion_left) for s in samples],
        }
        return change({k: torch.tensor(v) for k, v in batch.items()}, samples, pad_token_id)

    return collate


def changed(key, change):
    return collator(lambda batch, samples, pad: {**batch, key: change(batch)})


def without_last(mask):
    return mask * (mask.cumsum(-1) < mask.sum(-1, keepdim=True)).long()


def by_id(batch, samples, pad):
    return {**batch, "loss_mask": batch["loss_mask"] * (batch["input_ids"] != pad).long()}


def attention_by_id(batch, samples, pad):
    return {**batch, "attention_mask": (batch["input_ids"] != pad).long()}


def restarting(batch):
    inside, prompt = batch["loss_mask"], batch["attention_mask"] - batch["loss_mask"]
    return (inside.cumsum(-1) - 1) * inside + (prompt.cumsum(-1) - 1) * prompt


def cut(batch, samples, pad):
    return {k: v[:, :-1] if v.dim() == 2 else v for k, v in batch.items()}


def rows_sorted(batch, samples, pad):
    order = torch.argsort(-batch["attention_mask"].sum(-1), stable=True)
    return {k: v[order] if v.dim() == 2 else v for k, v in batch.items()}


COLLATORS = {
    "prompt_in_loss": changed("loss_mask", lambda b: b["attention_mask"]),
    "padding_in_loss": changed("loss_mask", lambda b: torch.ones_like(b["loss_mask"])),
    "eos_not_in_loss": collator(by_id),
    "last_token_not_in_loss": changed("loss_mask", lambda b: without_last(b["loss_mask"])),
    "mask_shifted": changed("loss_mask", lambda b: torch.roll(b["loss_mask"], -1, 1)),
    "attention_on_padding": changed("attention_mask", lambda b: torch.ones_like(b["attention_mask"])),
    "attention_by_id": collator(attention_by_id),
    "attention_not_on_prompt": changed("attention_mask", lambda b: b["loss_mask"]),
    "padding_between": collator(prompt_left=False),
    "completion_padded_left": collator(completion_left=True),
    "positions_count_padding": collator(
        lambda b, samples, pad: {**b, "position_ids": torch.arange(b["input_ids"].shape[1]).expand_as(b["input_ids"])}
    ),
    "positions_restart": collator(lambda b, samples, pad: {**b, "position_ids": restarting(b)}),
    "last_column_cut": collator(cut),
    "rows_reordered": collator(rows_sorted),
    "values_reordered": changed("advantages", lambda b: b["advantages"].flip(0)),
    "missing_logprob_is_zero": changed("old_logprobs", lambda b: b["old_logprobs"].nan_to_num(0.0)),
}
