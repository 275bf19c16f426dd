"""The shipped checkpoint is small, loads everywhere, encodes anything and already knows the answer format."""

import pathlib
import unicodedata

import pytest

from rollwire import policies
from rollwire.environment.frozen_lake import ACTIONS, FrozenLake
from rollwire.rollout.prompts import PromptTemplates

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

TINY = pathlib.Path(policies.resolve("builtin:tiny"))
TEXTS = [
    "plain words, 10 and 1234, tabs\tand   blanks \n",
    "√ P_OGX <answer>Left</answer> <|im_end|><|im_start|>user\n Rightly Up10",
    "日本語 📦 é \x00\x7f\u2028 \U0010ffff",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY).eval()


def opening(seed: int) -> list[dict[str, str]]:
    observation, info = FrozenLake().reset(seed)
    return PromptTemplates().first_messages(info["instructions"], observation, 0, 10, 128)


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_checkpoint_is_at_most_5_mb() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 5_000_000


def test_model_is_a_tied_float32_qwen2_of_its_tokenizer_s_vocabulary(model, tokenizer) -> None:
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert (model.config.eos_token_id, model.config.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer, text: str) -> None:
    assert unicodedata.is_normalized("NFC", text)
    assert tokenizer.decode(encode(tokenizer, text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_do_not_depend_on_the_version_of_transformers(tokenizer, text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    plain = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert encode(tokenizer, text) == plain.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("symbol", [*"P_OGX√", "\n", *ACTIONS, "<answer>", "</answer>", *map(str, range(21))])
def test_what_the_game_is_made_of_takes_one_token_each(tokenizer, symbol: str) -> None:
    assert len(encode(tokenizer, symbol)) == 1


def test_incremental_tokens_equal_the_whole_conversation(tokenizer) -> None:
    later = PromptTemplates().next_messages("P_\nOG", 1, 9, 128)
    first_block = tokenizer.apply_chat_template(opening(42), add_generation_prompt=True, tokenize=False)
    later_block = "\n" + tokenizer.apply_chat_template(later, add_generation_prompt=True, tokenize=False)
    response = "<answer>Right</answer>"
    pieces = [encode(tokenizer, text) for text in (first_block, response + "<|im_end|>", later_block)]
    conversation = [*opening(42), {"role": "assistant", "content": response}, *later]
    whole = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert [*pieces[0], *pieces[1], *pieces[2]] == encode(tokenizer, whole)
    assert [len(piece) for piece in pieces][:2] == [34, 4]


def test_template_adds_no_system_message_of_its_own(tokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_likeliest_responses_are_well_formed(model, tokenizer) -> None:
    for seed in range(8):
        text = tokenizer.apply_chat_template(opening(seed), add_generation_prompt=True, tokenize=False)
        prompt = torch.tensor([encode(tokenizer, text)])
        output = model.generate(prompt, do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(prompt))
        response = tokenizer.decode(output[0, prompt.shape[1] :])
        assert response in [f"<answer>{action}</answer><|im_end|>" for action in ACTIONS]


def test_resolve_passes_paths_and_hub_ids_through() -> None:
    assert policies.resolve("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"


def test_resolve_names_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"'builtin:huge'.*builtin:tiny"):
        policies.resolve("builtin:huge")
