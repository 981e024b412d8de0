import pytest

from keyhole.eval.tiny_language.tasks import TASKS, make
from keyhole.eval.tiny_language.world import BOS, PAD, VOCABULARY_SIZE, WORD_IDS
from recipes.tiny_model.export import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_ids_are_dense(tokenizer):
    assert sorted(WORD_IDS.values()) == list(range(VOCABULARY_SIZE)) == list(range(len(tokenizer)))


@pytest.mark.parametrize("task", TASKS)
def test_items_round_trip_without_unknown_words(tokenizer, task):
    text = make(task, 256, 0).prompt
    ids = tokenizer(text).input_ids
    assert WORD_IDS[PAD] not in ids
    assert tokenizer.decode(ids) == f"{BOS} {text}"
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_text_gets_one_bos_and_a_later_piece_none(tokenizer):
    assert tokenizer("Alma keeps").input_ids == [WORD_IDS[w] for w in (BOS, "Alma", "keeps")]
    assert tokenizer("keeps", add_special_tokens=False).input_ids == [WORD_IDS["keeps"]]


def chat(tokenizer, *contents, **options):
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_chat_reads_as_the_model_was_trained(tokenizer):
    turns = ("Alma keeps 3 . question : Alma keeps ?", "Alma keeps 3 . done", "question : all Bo ?")
    assert chat(tokenizer, *turns, add_generation_prompt=True) == (
        "<bos> Alma keeps 3 . question : Alma keeps ? answer : Alma keeps 3 . done <eos>"
        " question : all Bo ? answer :"
    )


def test_chat_adds_the_answer_mark_only_where_it_is_missing(tokenizer):
    marked = "question : Alma keeps ? answer :"
    assert chat(tokenizer, marked, add_generation_prompt=True) == f"<bos> {marked}"
    assert chat(tokenizer, "question : all Bo ?") == "<bos> question : all Bo ?"


def test_chat_tokens_begin_with_one_bos(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Alma"}]).input_ids
    assert ids == [WORD_IDS[BOS], WORD_IDS["Alma"]]
