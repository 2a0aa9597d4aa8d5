"""The lm-eval model: arguments, refused requests, resuming, and tasks over a local data folder."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.calibration.profile import BadProfile, profile_of
from emad_ref.calibration.trace import take_trace
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import fixed_entropy_point
from emad_ref.models.loading import load
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from emad_ref.replay.replay import replay_depths
from emad_ref.text import world
from pytest_emad.tasks.scoring import encode_item, mark_correct_items_from_trace, to_token_sequences
from tests.small_models import small_model
from tests.unit.models.test_special_tokens import BOS, EOS, LLAMA, TURN, UNK, ids, stored, third_token, transformers_own
from tests.unit.tasks.test_datasets import write, write_folder

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
import lm_eval.tasks
from lm_eval.api.model import TemplateLM
from lm_eval.tasks._yaml_loader import load_yaml

from pytest_emad.tasks import lm_eval_model, metrics
from pytest_emad.tasks.continuation_scoring import make_stop_string_check
from pytest_emad.tasks.evaluation import TaskResult, evaluate_tasks, list_available_task_names, make_task_manager
from pytest_emad.tasks.lm_eval_model import EmadLM
from pytest_emad.tasks.lm_eval_settings import TASK_FOLDER
from pytest_emad.tasks.pair_lm_eval_model import PairLM
from pytest_emad.tasks.sandbox import CODE_EXECUTION
from pytest_emad.tasks.scoring import PairAnswerFunctions, PairAnswerTokens

STOCK = Path(lm_eval.tasks.__file__).parent
EARLY = fixed_entropy_point(4, (1, 2, 3), 1.0)


@pytest.fixture(scope="module")
def nano():
    return load("emad-nano")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def profile(nano, tmp_path_factory):
    """Return a profile of the model on a few of the world's examples."""
    items = [
        encode_item(e, nano.tokenizer, nano.opening_token_id) for e in world.generate_examples("facts", "calibrate", 8)
    ]
    trace = take_trace(nano.stepper, to_token_sequences(items))
    known = {"model": nano.name, "fingerprint": nano.fingerprint, "corpus": "facts", "dtype": "float32"}
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile_of(trace, (1, 2), **known).save(path)
    return path


def request(*arguments):
    return SimpleNamespace(args=arguments)


SCORED = [request("Ada has", f" {n} cards.") for n in range(1, 7)]


# ---------------------------------------------------------------- arguments


def test_lm_eval_makes_the_model_from_its_argument_string(nano, profile):
    """As ``--model emad --model_args …`` does, once this module is imported."""
    from lm_eval.api.registry import get_model

    arguments = f"pretrained=emad-nano,profile={profile},margin=0.1"
    lm = get_model("emad").create_from_arg_string(arguments, {"batch_size": 2, "max_batch_size": None, "device": None})
    assert (lm.point.family, lm.point.margin_nats, lm.batch_size) == ("emad", 0.1, 2)
    assert lm.point.probes == (1, 2)
    assert lm.max_length == lm.stepper.max_positions
    assert lm.get_model_info()["fingerprint"] == nano.fingerprint


def test_without_a_point_or_profile_it_is_full_depth(nano):
    assert EmadLM(nano).point == full_depth(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"margin": 0.1}, "margin=0.1, but expected a profile beside it"),
        *(
            ({"margin": margin, "profile": "x.json"}, f"margin={margin!r}, but expected a number of nats")
            for margin in ("abc", "0.2 nats", True, [0.1])
        ),
        ({"point": full_depth(4), "profile": "x.json"}, "profile='x.json', but expected None beside a point"),
        ({"point": full_depth(12)}, "point.layers=12, but expected 4"),
        ({"batch_size": 0}, "batch_size=0, but expected a number of rows ≥ 1, or auto"),
        ({"batch_size": "auto:x"}, "batch_size='auto:x'"),
        ({"max_batch_size": 0}, "batch_size=0, but expected a number of rows"),
        ({"parallelize": True}, "model_args={'parallelize': True}, but expected arguments of this model: pretrained"),
        ({"trust_remote_code": True}, "leave --trust_remote_code out"),
        ({"max_lenght": 8}, "nearest: max_length"),
        ({"max_length": 100_000}, "max_length=100000, but expected 1–"),
        ({"dtype": "float64"}, "None for a loaded model"),
    ],
)
def test_contradictory_arguments_are_refused(nano, arguments, message):
    with pytest.raises(BadArgument) as refused:
        EmadLM(nano, **arguments)
    assert message in str(refused.value)


def test_other_arguments_are_refused_by_name(nano, profile):
    with pytest.raises(BadArgument, match="a model with a tokenizer that has an end-of-text token; random weights"):
        EmadLM("random:pythia-70m")
    with pytest.raises(BadArgument, match="dtype='int8', but expected one of float64"):
        EmadLM("emad-nano", dtype="int8")
    with pytest.raises(BadProfile, match="fingerprint"):
        EmadLM("emad-tiny", profile=profile)
    assert EmadLM("emad-nano", batch_size="auto", dtype="bfloat16").stepper.dtype.itemsize == 2


@pytest.mark.parametrize("rows", ["auto", "auto:4", None])
def test_rows_that_lm_eval_leaves_open_are_bounded_by_the_largest_it_allows(nano, rows):
    model = EmadLM(nano, batch_size=rows, max_batch_size=3)
    assert [len(batch) for batch in model._batches(["ab"] * 7, len)] == [3, 3, 1]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [(TEMPLATE, "<system>Be brief.\n<user>1 + 1?\n<assistant>"), (STRICT, "<user>1 + 1?\n<assistant>")],
)
def test_a_chat_template_is_the_tokenizers_own(nano, monkeypatch, template, text):
    monkeypatch.setattr(nano.tokenizer, "chat_template", template)
    assert EmadLM(nano).apply_chat_template(CHAT) == text


def test_without_a_chat_template_the_option_is_refused_by_name(nano, monkeypatch):
    monkeypatch.setattr(nano.tokenizer, "chat_template", None)
    with pytest.raises(BadArgument, match=r"--apply_chat_template=.emad-nano., but expected a model whose tokenizer"):
        EmadLM(nano).apply_chat_template(CHAT)


# ---------------------------------------------------------------- opening and end of a text


def folder_of(tmp_path, named, config, generation):
    return stored(tmp_path / "model", small_model("llama", torch.float32), named, config, generation)


def test_a_text_ends_at_every_declared_end(tmp_path):
    ends = ids(BOS, [EOS, third_token()])
    lm = EmadLM(folder_of(tmp_path, LLAMA, ends, ends))
    asked = [request("<s> w9 w17", {"until": ["never"], "max_gen_toks": 9})]
    (text,) = lm.generate_until(asked, disable_tqdm=True)
    own = transformers_own(str(tmp_path / "model"), lm.tok_encode("<s> w9 w17"), 9)
    assert len(own) == 3
    assert text == lm.tokenizer.decode(own[:2])
    pair = PairLM(PairAnswerFunctions(lambda wanted: [alone(lm, one) for one in wanted], None), (lm.loaded, lm.loaded))
    asked = [SimpleNamespace(args=asked[0].args, task_name="task", doc_id=0)]
    assert pair.generate_until(asked, disable_tqdm=True) == [text]


def alone(lm, wanted):
    decoder = WalkedDecoder(lm.stepper, lm.point)
    (made,) = decoder.generate([Prompt(wanted.prompt)], wanted.most, wanted.stop).emitted
    return PairAnswerTokens(made, len(made))


def test_an_empty_context_is_what_opens_every_text(tmp_path):
    lm = EmadLM(folder_of(tmp_path, LLAMA, ids(UNK, EOS), ids(UNK, EOS)))
    assert lm.prefix_token_id == lm.loaded.opening_token_id == BOS
    assert lm.get_model_info()["special_tokens"] == {"opening": BOS, "ends": [EOS], "padding": None}


def test_an_end_that_only_a_config_declares_will_do(tmp_path):
    lm = EmadLM(folder_of(tmp_path, {"unk_token": "<unk>"}, ids(BOS, TURN), None))
    assert (lm.eot_token_id, lm.prefix_token_id) == (TURN, BOS)
    nowhere = stored(tmp_path / "endless", small_model("llama", torch.float32), {}, ids(BOS), None)
    with pytest.raises(BadArgument, match="a model with a tokenizer that has an end-of-text token"):
        EmadLM(nowhere)


def test_lm_evals_request_cache_is_refused(nano, tmp_path):
    """It would return one operating point's results for another."""
    from lm_eval.api.model import CachingLM

    with pytest.raises(BadArgument, match=r"use_cache=.*leave --use_cache out"):
        CachingLM(EmadLM(nano), str(tmp_path / "cache.db"))


# ---------------------------------------------------------------- tokens and requests


@pytest.mark.parametrize(("asked", "opened"), [(None, False), (True, True), (False, False)])
def test_the_opening_token_stands_where_it_is_asked_for_and_never_twice(nano, asked, opened):
    lm = EmadLM(nano, add_bos_token=asked)
    bare = nano.tokenizer.encode("Ada has", add_special_tokens=False)
    assert lm.tok_encode("Ada has") == [lm.prefix_token_id] * opened + bare
    already = nano.tokenizer.decode([lm.prefix_token_id]) + "Ada has"
    assert lm.tok_encode(already) == [lm.prefix_token_id, *bare]
    assert lm.tok_encode("Ada has", add_special_tokens=False) == bare


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, "expected greedy decoding; drop sampling"),
        ({"num_beams": 4}, "expected greedy decoding"),
        ({"max_gen_toks": 512}, "max_gen_toks=512, but expected 1–511"),
        ({"max_gen_toks": 0}, "max_gen_toks=0"),
    ],
)
def test_what_greedy_decoding_does_not_do_is_refused(nano, settings, message):
    with pytest.raises(BadArgument, match=message):
        EmadLM(nano).generate_until([request("Ada", {"until": ["."], **settings})], disable_tqdm=True)


def test_settings_without_effect_on_greedy_decoding_are_taken(nano):
    plain, named = ({"until": ["."], "max_gen_toks": 5, **more} for more in ({}, {"temperature": 0.0, "top_p": 0.9}))
    first, second = EmadLM(nano).generate_until([request("Ada", plain), request("Ada", named)], disable_tqdm=True)
    assert first == second


def test_nothing_to_score_is_refused(nano):
    with pytest.raises(BadArgument, match="1 context and 0 continuation tokens', but expected at least one of each"):
        EmadLM(nano)._loglikelihood_tokens([(None, [5], [])])
    with pytest.raises(BadArgument, match="at most 8 to predict"):
        EmadLM(nano, max_length=8)._loglikelihood_tokens([(None, [5], list(range(9)))])


def test_what_is_asked_is_kept_with_the_answer_that_was_written_and_an_empty_one_ends_at_once(nano):
    lm = EmadLM(nano, max_length=8)
    assert lm._as_written([5, 6, 7], "").tokens.tolist() == [5, 6, 7, lm.eot_token_id]
    written = lm._as_written([5, 6, 7], " Mira went home and so did Tom, Ada and Ben.")
    assert (written.tokens[:3].tolist(), written.first_decided, len(written.tokens)) == ([5, 6, 7], 2, 9)
    lm._loglikelihood_tokens([("", [5, 6], [7, 8])])
    (asked,) = lm.decided
    assert (asked.tokens.tolist(), asked.first_decided) == ([5, 6, 7, 8], 1)


def test_a_text_without_tokens_has_likelihood_one(nano):
    assert EmadLM(nano).loglikelihood_rolling([request("")], disable_tqdm=True) == [0]


def test_a_long_context_is_cut_on_the_left_and_said_to_be(nano, caplog):
    lm = EmadLM(nano, max_length=20)
    settings = {"until": [], "max_gen_toks": 4}
    whole = "Ada has nine cards and Bob has two. " * 5
    tail = nano.tokenizer.decode(nano.tokenizer.encode(whole)[-16:])
    long, short = lm.generate_until([request(whole, settings), request(tail, settings)], disable_tqdm=True)
    assert long == short
    assert "the contexts of 1 of 2 requests are cut on the left: emad-nano sees 20 tokens" in caplog.text


def test_cut_contexts_are_counted_by_task_and_said_once(nano, caplog):
    """Not once per request: a task of a thousand long documents would repeat it a thousand times."""
    lm, long, short = EmadLM(nano, max_length=20), "Ada has nine cards and Bob has two. " * 5, "Ada has"
    settings = {"until": [], "max_gen_toks": 4}
    asked = [("one", long), ("one", long + "Now"), ("two", short), ("three", long)]
    lm.generate_until([SimpleNamespace(args=(c, settings), task_name=t) for t, c in asked], disable_tqdm=True)
    assert lm.cut == {"one": 2, "three": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "one: the contexts of 2 of 2 requests" in caplog.text
    scored = [SimpleNamespace(args=(c, " nine"), task_name=t) for t, c in [("one", long), ("two", short)]]
    lm.loglikelihood(scored, disable_tqdm=True)
    assert lm.cut == {"one": 3, "three": 1}
    lm.loglikelihood_rolling([request(long)], disable_tqdm=True)
    assert sum(lm.cut.values()) == 4, "windows lose nothing: every token of them is predicted once"


def test_the_count_of_cut_contexts_reaches_the_results(nano, data):
    longest = 16
    lm = EmadLM(nano, max_length=lm_eval_model.NEW_TOKENS + longest)  # SQuAD's definition names no length
    first, again = (evaluate_tasks(lm, ["squad", "arc_easy", "pile"], data=data) for _ in range(2))
    squad = make_task_manager(data).load(["squad"])["tasks"]["squad"]
    prompts = [squad.fewshot_context(document, 0) for document in squad.eval_docs]
    assert first["squad"].cut == sum(len(nano.tokenizer.encode(prompt)) > longest for prompt in prompts) > 0
    assert first["pile"].cut == 0
    assert {name: result.cut for name, result in first.items()} == {name: r.cut for name, r in again.items()}


def test_bars_are_drawn_where_the_caller_says(nano, monkeypatch, capsys):
    monkeypatch.setattr(lm_eval_model, "QUIET_SECONDS", 0.0)
    screen = io.StringIO()
    EmadLM(nano, progress=screen).generate_until([request("Ada", {"until": ["."], "max_gen_toks": 4})])
    assert "generating at full depth: 100%" in screen.getvalue()
    assert "generating" not in capsys.readouterr().err


# ---------------------------------------------------------------- stop strings

SPELLED = ["ab", " c", "\n", "ü", "<", "|", "end", ">", "d e"]
STOPS = {"\n": (2,), "b c": (0, 1), "<|end|>": (4, 5, 6, 5, 7), "abab": (0, 0), "üü": (3, 3)}


@given(st.lists(st.integers(0, len(SPELLED) - 1), max_size=12), st.sampled_from(list(STOPS)))
def test_a_stop_string_is_found_at_the_token_that_completes_it(before, stop):
    """For a tokenizer whose decoding concatenates its tokens, the tail decides as the whole text does."""

    def text(ids):
        return "".join(SPELLED[i] for i in ids)

    tokens, stopped = [*before, *STOPS[stop]], make_stop_string_check(text, ["", stop])
    first = next(n for n in range(1, len(tokens) + 1) if stop in text(tokens[:n]))
    assert [n for n in range(1, first + 1) if stopped(tokens[:n])] == [first]


def test_a_stop_string_that_only_the_tail_seems_to_hold_does_not_count():
    """A decoded part may contain text that the whole does not: sentencepiece drops a leading space."""
    assert not make_stop_string_check(lambda ids: "stop" if len(ids) < 9 else "st op", ["stop"])(list(range(20)))
    assert make_stop_string_check(lambda ids: "stop", ["stop"])(list(range(20)))


@pytest.mark.parametrize("stops", [[" "], ["\n"], ["has"], ["cards.", "9 "], ["zzz"]])
def test_looking_at_the_tail_changes_no_text(nano, monkeypatch, stops):
    settings = {"until": stops, "max_gen_toks": 24}
    requests = [request(text, settings) for text in ("Ada has", "Bob finds the key in", "How many cards", "In 1834")]
    mine = EmadLM(nano).generate_until(requests, disable_tqdm=True)

    def whole(text, wanted):
        return lambda tokens: any(stop in text(tokens) for stop in wanted if stop)

    monkeypatch.setattr(lm_eval_model, "make_stop_string_check", whole)
    assert mine == EmadLM(nano).generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize("point", [full_depth(4), EARLY], ids=lambda point: point.name)
def test_our_own_path_emits_what_the_protocol_gives(nano, point):
    """Logits stay on the device, and a prompt takes one pass if no token can exit."""
    settings = {"until": ["."], "max_gen_toks": 12}
    requests = [request(text, settings) for text in ("Ada has", "Bob finds the key in", "How many cards", "In 1834")]
    mine = EmadLM(nano, point=point).generate_until(requests, disable_tqdm=True)
    decoder = WalkedDecoder(nano.stepper, point, max_rows=4)
    assert mine == EmadLM(nano, point=point, decoder=decoder, batch_size=4).generate_until(requests, disable_tqdm=True)


def test_equal_requests_are_run_once(nano, monkeypatch):
    ran: list[int] = []
    real = lm_eval_model.score_by_replay

    def counted(stepper, point, batch):
        ran.append(len(batch))
        return real(stepper, point, batch)

    monkeypatch.setattr(lm_eval_model, "score_by_replay", counted)
    answers = EmadLM(nano).loglikelihood([*SCORED, *SCORED], disable_tqdm=True)
    assert answers[: len(SCORED)] == answers[len(SCORED) :]
    assert sum(ran) == len(SCORED)
    settings = {"until": ["."], "max_gen_toks": 8}
    generated: list[int] = []
    write = EmadLM._generate
    monkeypatch.setattr(
        EmadLM, "_generate", lambda lm, texts, *rest: generated.append(len(texts)) or write(lm, texts, *rest)
    )
    once, again = EmadLM(nano).generate_until([request("Ada", settings)] * 2, disable_tqdm=True)
    assert once == again
    assert generated == [1]


# ---------------------------------------------------------------- task definitions

SAME_NAME = ["wikitext", "arc_easy", "arc_challenge", "gsm8k", "hendrycks_math_algebra", "hendrycks_math_precalc"]
PLACES = {"wikitext": "wikitext/wikitext", "gsm8k": "gsm8k/gsm8k"}
OURS = {"custom_dataset", "dataset_kwargs", "dataset_path", "dataset_name", "tag", "process_docs", "metric_list"}


def stock(name: str) -> dict:
    folder = "arc" if name.startswith("arc") else "hendrycks_math"
    return load_yaml(STOCK / f"{PLACES.get(name, f'{folder}/{name}')}.yaml")


def plain(value):
    return (value.__module__, value.__qualname__) if callable(value) else value


@pytest.mark.parametrize("name", SAME_NAME)
def test_tasks_of_lm_evals_names_are_lm_evals_tasks(name):
    """Every prompt, stop sequence, filter, metric and shot is lm-eval's; only the source of documents differs."""
    mine, theirs = load_yaml(TASK_FOLDER / f"{name}.yaml"), stock(name)
    left_out = OURS | ({"training_split"} if name == "wikitext" else set())
    assert {k: plain(v) for k, v in mine.items() if k not in left_out} == {
        k: plain(v) for k, v in theirs.items() if k not in left_out
    }
    assert (mine["dataset_kwargs"]["hub"], mine["dataset_kwargs"]["name"]) == (
        theirs["dataset_path"],
        theirs["dataset_name"],
    )
    for metric, named in zip(mine["metric_list"], theirs["metric_list"], strict=True):
        assert named.items() <= metric.items()  # the stock WikiText leaves its aggregation to a default


def test_every_subject_of_math_is_a_task_and_the_group_has_them_all():
    group, theirs = (load_yaml(folder / "hendrycks_math.yaml") for folder in (TASK_FOLDER, STOCK / "hendrycks_math"))
    assert group == theirs
    for name in group["task"]:
        mine = load_yaml(TASK_FOLDER / f"{name}.yaml")
        assert (mine["task"], mine["dataset_kwargs"]["name"]) == (name, stock(name)["dataset_name"])
        assert mine["dataset_kwargs"]["folder"] == f"math/{stock(name)['dataset_name']}"


def test_humaneval_is_asked_as_lm_eval_asks_it():
    mine = load_yaml(TASK_FOLDER / "humaneval.yaml", resolve_func=False)
    theirs = load_yaml(STOCK / "humaneval/humaneval.yaml", resolve_func=False)  # its functions need the hub
    for key in ("doc_to_text", "doc_to_target", "generation_kwargs", "unsafe_code", "num_fewshot", "repeats"):
        assert mine[key] == theirs[key]


def test_every_definition_can_be_found_by_name():
    written = [load_yaml(path, resolve_func=False) for path in TASK_FOLDER.glob("*.yaml")]
    assert {definition.get("group", definition["task"]) for definition in written} <= set(list_available_task_names())
    assert {"wikitext_103", "pile", "squad", "samsum", "humaneval", "hendrycks_math", "world_code"} <= set(
        list_available_task_names()
    )


# ---------------------------------------------------------------- evaluation


def test_every_task_runs_over_a_local_folder(nano, data):
    tasks = ["wikitext", "wikitext_103", "pile", "arc_easy", "arc_challenge", "gsm8k", "hendrycks_math_algebra"]
    results = evaluate_tasks(EmadLM(nano, point=EARLY), [*tasks, "squad", "samsum"], data=data, limit=2)
    seen = {name: (result.metric, result.filter, result.n) for name, result in results.items()}
    assert seen == {
        "wikitext": ("word_perplexity", "none", 2),
        "wikitext_103": ("word_perplexity", "none", 2),
        "pile": ("word_perplexity", "none", 2),
        "arc_easy": ("acc", "none", 2),
        "arc_challenge": ("acc", "none", 2),
        "gsm8k": ("exact_match", "strict-match", 2),
        "hendrycks_math_algebra": ("exact_match", "none", 2),
        "squad": ("exact", "none", 2),
        "samsum": ("rougeL", "none", 1),
    }
    assert list(results["gsm8k"].others) == [("exact_match", "flexible-extract")]
    assert list(results["arc_easy"].others) == [("acc_norm", "none")]
    assert list(results["squad"].others) == [("f1", "none")]
    for result in results.values():
        assert result.scores.shape == (result.n,)
        assert np.isfinite(result.scores).all()
        assert len(set(result.items)) == result.n


def test_results_of_two_points_pair_document_by_document(nano, data):
    full, early = (evaluate_tasks(EmadLM(nano, point=p), ["pile"], data=data)["pile"] for p in (full_depth(4), EARLY))
    assert full.items == early.items
    assert (full.tokens == early.tokens).all()
    assert (full.scores != early.scores).any()


def test_perplexity_is_summed_over_documents_and_counts_their_tokens(nano, data):
    lm = EmadLM(nano)
    result = evaluate_tasks(lm, ["pile"], data=data)["pile"]
    texts = [json.loads(line)["text"] for line in (data / "pile/valid.jsonl").read_text().splitlines()]
    nats = [-v for v in lm.loglikelihood_rolling([request(text) for text in texts], disable_tqdm=True)]
    np.testing.assert_allclose(result.scores, nats, rtol=1e-6)
    assert result.tokens.tolist() == [len(nano.tokenizer.encode(text)) for text in texts]
    assert result.units.tolist() == [2, 5]
    assert result.value == pytest.approx(math.exp(sum(nats) / 7))


def test_a_perplexity_has_a_standard_error_from_its_documents():
    """Compared with the spread of the same ratio over resampled documents."""
    rng = np.random.default_rng(0)
    units = rng.integers(20, 200, size=400)
    scores = units * rng.normal(3.0, 0.5, size=400)
    result = TaskResult("t", "word_perplexity", "none", scores, ("",) * 400, ("",) * 400, tokens=units, units=units)
    drawn = rng.integers(0, 400, size=(4000, 400))
    spread = np.exp(scores[drawn].sum(axis=1) / units[drawn].sum(axis=1)).std()
    assert result.standard_error == pytest.approx(spread, rel=0.1)  # the bootstrap's own error is 1 %, linearising adds
    one = TaskResult("t", "word_perplexity", "none", scores[:1], ("",), ("",), tokens=units[:1], units=units[:1])
    assert one.standard_error is None


def test_an_accuracy_has_the_usual_standard_error():
    result = TaskResult("t", "acc", "none", np.array([1.0, 0.0, 1.0, 1.0]), ("",) * 4, ("",) * 4)
    assert (result.value, result.tokens) == (0.75, None)
    assert result.standard_error == pytest.approx(0.25)


@pytest.mark.parametrize("task", [task for task in world.TASKS if task != "code"])
def test_the_worlds_tasks_are_scored_as_the_suites_score_them(nano, task):
    lm = EmadLM(nano, point=EARLY, add_bos_token=True)
    result = evaluate_tasks(lm, [f"world_{task}"], limit=40)[f"world_{task}"]
    items = [
        encode_item(e, nano.tokenizer, nano.opening_token_id) for e in world.generate_examples(task, "evaluate", 40)
    ]
    trace = take_trace(nano.stepper, to_token_sequences(items))
    assert (
        result.scores.astype(bool).tolist()
        == mark_correct_items_from_trace(items, trace, replay_depths(trace, EARLY)).tolist()
    )


def test_the_worlds_programs_are_judged_by_their_asserts(nano):
    (document,) = (
        dict(row) for row in make_task_manager(None).load(["world_code"])["tasks"]["world_code"].eval_docs.take(1)
    )
    assert metrics.compute_world_code_metrics(document, [document["answer"]]) == {"acc": 1.0}
    assert metrics.compute_world_code_metrics(document, [" x + 1000\n"]) == {"acc": 0.0}
    assert metrics.compute_world_code_metrics(document, [document["answer"].rstrip("\n")]) == {
        "acc": 0.0
    }  # an unfinished line
    assert set(evaluate_tasks(EmadLM(nano), ["world_code"], limit=3)["world_code"].scores) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": []}, r"tasks=\[\], but expected at least one name"),
        ({"tasks": ["arc_easy"], "limit": 0}, "limit=0, but expected a count of documents ≥ 1"),
        ({"tasks": ["humaneval"]}, "run_code=None, but expected 'confined' for humaneval"),
    ],
)
def test_evaluation_refuses_what_it_cannot_do(nano, data, arguments, message):
    with pytest.raises(BadArgument, match=message):
        evaluate_tasks(EmadLM(nano), data=data, **arguments)


def test_bad_data_is_named_by_file_and_line(nano, tmp_path):
    (tmp_path / "pile").mkdir()
    (tmp_path / "pile/valid.jsonl").write_text('{"text": "a"}\n{"words": "b"}\n')
    with pytest.raises(BadArgument, match=r"valid\.jsonl, line 2: text=None"):
        evaluate_tasks(EmadLM(nano), ["pile"], data=tmp_path)


def test_simple_evaluate_takes_the_model_as_it_is(nano, data, monkeypatch):
    import lm_eval.evaluator

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # pip takes seconds
    lm = EmadLM(nano, point=EARLY)
    results = lm_eval.evaluator.simple_evaluate(
        model=lm, tasks=["arc_easy"], task_manager=make_task_manager(data), bootstrap_iters=0
    )
    mine = evaluate_tasks(lm, ["arc_easy"], data=data)["arc_easy"]
    assert results["results"]["arc_easy"]["acc,none"] == mine.value
    assert results["config"]["point"]["name"] == EARLY.name


# ---------------------------------------------------------------- scores of our own definitions


@pytest.mark.parametrize(
    ("prediction", "exact", "f1"),
    [
        ("the Elbe.", 1.0, 1.0),  # case, article and full stop do not count
        ("Elbe river", 0.0, 2 / 3),
        ("river", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_squad_scores_the_best_of_the_reference_answers(prediction, exact, f1):
    document = {"answers": {"text": ["Vltava", "The Elbe"]}}
    assert metrics.compute_squad_metrics(document, [prediction]) == {"exact": exact, "f1": pytest.approx(f1)}


def test_words_are_matched_as_often_as_both_texts_have_them():
    assert metrics.token_f1("red red fox", "red fox") == pytest.approx(2 * 2 / 5)
    assert metrics.token_f1("the", "a") == 1.0  # nothing remains of either


def test_samsum_is_scored_by_rouge():
    document = {"summary": "Bob wants tea"}
    assert metrics.compute_samsum_metrics(document, ["Bob wants tea"]) == {"rouge1": 1.0, "rougeL": 1.0}
    scores = metrics.compute_samsum_metrics(document, ["tea wants Bob"])
    assert scores == {"rouge1": 1.0, "rougeL": pytest.approx(1 / 3)}


@pytest.mark.parametrize("execution", CODE_EXECUTION)
def test_a_program_runs_as_the_caller_of_the_evaluation_says(tmp_path, monkeypatch, execution):
    class Writer(TemplateLM):
        eot_token_id = 0

        def tok_encode(self, string, **ignored):
            return [*string.encode()]

        def _loglikelihood_tokens(self, requests, **ignored):
            raise NotImplementedError

        def loglikelihood_rolling(self, requests, **ignored):
            raise NotImplementedError

        def generate_until(self, requests, **ignored):
            return ["    return a + b\n" for _ in requests]

    row = dict.fromkeys(("task_id", "canonical_solution", "test"), "one")
    row |= {"prompt": "def add(a, b):\n    'Sum.'\n", "entry_point": "add"}
    write(tmp_path / "humaneval/HumanEval.jsonl", [row])
    told = []
    monkeypatch.setattr(
        metrics,
        "check_program",
        lambda task, program, execution: told.append((program, execution)) or SimpleNamespace(outcome="passed"),
    )
    found = evaluate_tasks(Writer(), ["humaneval"], data=tmp_path, run_code=execution)["humaneval"]
    assert told == [(row["prompt"] + "    return a + b\n\n", execution)]
    assert found.value == 1.0


@pytest.mark.parametrize("outcome", ["passed", "failed", "timeout", "memory", "killed"])
def test_humaneval_is_judged_by_the_sandbox_and_says_how_a_program_was_ended(monkeypatch, outcome):
    monkeypatch.setattr(metrics, "check_program", lambda task, program, execution: SimpleNamespace(outcome=outcome))
    names = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
    found = metrics.compute_humaneval_metrics(dict.fromkeys(names, "one"), ["    return 1\n"])
    assert found.pop("pass@1") == float(outcome == "passed")
    assert found == {how: float(outcome == how) for how in ("timeout", "memory", "killed")}
