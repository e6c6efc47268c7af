"""Outputs keep to their grammars: whatever a model prefers, what it finishes is what was asked for."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from itertools import pairwise

import jsonschema
import llguidance
import numpy as np
import pytest
import torch

from kernels.sampling import Adjustment, RowSampling, sample
from shared.contracts.errors import InvalidInput
from shared.grammar import compiler as compiler_module
from shared.grammar import source
from shared.grammar.compiler import MAX_KEPT, SLOW_S, GrammarCompiler, LazyCompiler
from shared.grammar.constraint import Constraint, GrammarFault
from shared.grammar.row_masks import ConstrainedRow, RowMasks
from tests.json_schemas import SCHEMAS, WORD, obj
from tests.tiny_tokenizer import tiny_tokenizer, tokenizer_json

TOKENIZER = tiny_tokenizer()
EOS = 2
VOCAB = 320
WORDS = VOCAB // 32
COMPILER = GrammarCompiler(TOKENIZER, slow_s=SLOW_S)
CLOSERS = [TOKENIZER.encode(text)[0] for text in ('"', "}", "]")]
FIELD = "response_format"


def allowed(place: Constraint) -> list[int]:
    row = np.zeros(WORDS, dtype=np.uint32)
    place.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def write(grammar: str, seed: int, temperature: float, most: int = 700) -> tuple[str, bool, list[int]]:
    """(text, whether it came to its end, tokens) of a model with random preferences, and a taste for endings."""
    place, generator, output = COMPILER.constraint(grammar), torch.Generator().manual_seed(seed), list[int]()
    while len(output) < most:
        row = np.zeros(WORDS, dtype=np.uint32)
        place.advance_to(output)
        place.fill(row)
        logits = torch.randn((1, VOCAB), generator=generator)
        logits[0, CLOSERS] += 1.5
        how = RowSampling(temperature, 0, 1.0, seed, len(output), adjustment=Adjustment(mask=row))
        output += sample(logits, [how])
        if output[-1] == EOS:
            return TOKENIZER.decode(output), True, output
    return TOKENIZER.decode(output), False, output


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_finished_under_a_schema_is_valid(name: str) -> None:
    schema = SCHEMAS[name]
    grammar = source.schema_grammar(schema, FIELD)
    check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for seed, temperature in ((1, 0.0), (2, 0.0), (3, 1.0), (4, 1.7)):
        text, ended, _ = write(grammar, seed, temperature)
        assert ended, f"{seed}: {text[:200]}"
        check.validate(json.loads(text))


def test_whitespace_is_bounded() -> None:
    text, ended, _ = write(source.schema_grammar(SCHEMAS["array of objects"], FIELD), 5, 1.0)
    assert ended
    outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    assert max(map(len, re.findall(r"\s+", outside)), default=0) <= 25
    assert not re.search(r"\s\n| \s*\n|\n.*\n\s*\n", outside)


def test_any_object_is_an_object() -> None:
    text, ended, _ = write(source.schema_grammar(source.ANY_OBJECT, FIELD), 3, 1.0, most=3000)
    assert ended
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("pattern", [r"[a-c]{2,5}", r"a/b\/c", r"(yes|no)!?", "a\nb", r"[/]+x"])
def test_a_regular_expression_is_matched_from_end_to_end(pattern: str) -> None:
    for seed in range(4):
        text, ended, _ = write(source.regex_grammar(pattern, FIELD), seed, 1.0)
        assert ended
        assert re.fullmatch(pattern, text)


def test_one_of_the_choices_is_written() -> None:
    choices = ["yes", 'no "really"', "back\\slash", "é\n", "yes, but"]
    seen = {write(source.choice_grammar(choices, FIELD), seed, 1.0)[0] for seed in range(40)}
    assert seen <= set(choices)
    assert len(seen) > 2


def test_a_grammar_may_end_where_it_may_and_nowhere_else() -> None:
    place = COMPILER.constraint(source.regex_grammar("ab?", FIELD))
    a, b = TOKENIZER.encode("a"), TOKENIZER.encode("b")
    assert allowed(place) == a
    with pytest.raises(GrammarFault, match="ends before"):
        place.advance_to([EOS])
    place.advance_to(a)
    assert sorted(allowed(place)) == sorted([*b, EOS])
    place.advance_to([*a, *b])
    assert allowed(place) == [EOS]
    place.advance_to([*a, *b, EOS])
    assert allowed(place) == [EOS]
    with pytest.raises(GrammarFault, match="follows the end"):
        place.advance_to([*a, *b, EOS, *a])


@pytest.mark.parametrize("token", [-1, 5, 10**6])
def test_a_token_that_is_not_allowed_is_a_fault_and_no_crash(token: int) -> None:
    place = COMPILER.constraint(source.regex_grammar("ab", FIELD))
    with pytest.raises(GrammarFault):
        place.advance_to([token])
    place.advance_to(TOKENIZER.encode("ab"))
    assert allowed(place) == [EOS]


@pytest.mark.parametrize("name", ["nested", "array of objects", "union", "pattern"])
def test_the_place_depends_on_the_tokens_alone(name: str) -> None:
    """Whether they came one by one, all at once, or after others that were taken back."""
    grammar = source.schema_grammar(SCHEMAS[name], FIELD)
    _, _, output = write(grammar, 6, 1.0)
    step_by_step, moved = COMPILER.constraint(grammar), COMPILER.constraint(grammar)
    lengths = np.random.default_rng(1).integers(0, len(output) + 1, size=40).tolist()
    masks: dict[int, list[int]] = {}
    for length in range(len(output) + 1):
        step_by_step.advance_to(output[:length])
        masks[length] = allowed(step_by_step)
    for before, after in pairwise(lengths):
        moved.advance_to(output[:before])
        moved.advance_to(output[:after])
        assert allowed(moved) == masks[after], (before, after)


def test_masks_of_a_step_know_their_sequences_again() -> None:
    grammar = source.schema_grammar(SCHEMAS["flat"], FIELD)
    _, _, output = write(grammar, 7, 1.0)
    masks = RowMasks(_lazy(), VOCAB)

    def rows(*lengths: int) -> list[ConstrainedRow]:
        return [ConstrainedRow(i, f"s{i}", grammar, (tuple(output[:n]),)) for i, n in enumerate(lengths)]

    first, second = masks.now(rows(1, 4)), masks.begin(rows(2, 5)).result()
    fresh = RowMasks(_lazy(), VOCAB).now(rows(2, 5))
    assert first.bits[0].shape == (1, WORDS)
    for i in (0, 1):
        assert np.array_equal(second.bits[i], fresh.bits[i])


def test_rows_of_a_draft_have_masks_of_their_own() -> None:
    grammar = source.regex_grammar("abc", FIELD)
    a, b, c = (TOKENIZER.encode(char)[0] for char in "abc")
    row = ConstrainedRow(0, "s", grammar, ((), (a,), (a, b)))
    bits = RowMasks(_lazy(), VOCAB).now([row]).bits[0]
    found = [np.flatnonzero(np.unpackbits(own.view(np.uint8), bitorder="little")).tolist() for own in bits]
    assert found == [[a], [b], [c]]


def test_an_output_that_breaks_its_grammar_is_a_fault_and_its_neighbour_goes_on() -> None:
    grammar = source.regex_grammar("ab", FIELD)
    a, b = (TOKENIZER.encode(char)[0] for char in "ab")
    masks = RowMasks(_lazy(), VOCAB)
    found = masks.now([ConstrainedRow(0, "x", grammar, ((b,),)), ConstrainedRow(1, "y", grammar, ((a,),))])
    assert list(found.faults) == [0]
    assert list(found.bits) == [1]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": "text"}},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "https://example.com/schema"},
        {"type": "string", "pattern": "^(?=a).*$"},
        {"type": "string", "pattern": "(["},
        {"type": "string", "format": "phone"},
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "integer", "minimum": 5, "maximum": 2},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
        obj(a=False),
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as refused:
        COMPILER.require(source.schema_grammar(schema, FIELD), FIELD)
    assert refused.value.param == FIELD
    assert "x-guidance" not in refused.value.message


def _deep(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "x-guidance": {"lenient": True}},
        {"properties": {"a": {"x-guidance": {"coerce_one_of": True}}}},
        {"enum": ["x" * 70_000]},
        _deep(100),
        {"const": 2**53 + 1},
        {"enum": [1, -(2**60)]},
        {"type": "integer", "multipleOf": 999_983},
        {"multipleOf": 0.999983},
        {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
    ],
    ids=[
        "options",
        "options inside",
        "large",
        "deep",
        "large constant",
        "large choice",
        "large divisor",
        "divisor with many digits",
        "large divisor in parts",
    ],
)
def test_options_size_and_depth_are_refused_before_anything_is_compiled(schema: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as refused:
        source.schema_grammar(schema, FIELD)
    assert refused.value.param == FIELD


@pytest.mark.parametrize("multiple", [7, 1000, 10**9, 0.01, 1e-9, 9973])
def test_usual_divisors_are_let_in(multiple: float) -> None:
    assert source.schema_grammar({"type": "number", "multipleOf": multiple}, FIELD)


@pytest.mark.parametrize(
    "text",
    [
        'start: %json {"type": "integer", "multipleOf": 999983}',
        'start: a b\na: %json{"multipleOf": 9973}\nb: %json {"multipleOf": 9967}',
        'start: %json {"x-guidance": {"lenient": true}}',
        'start: %json {"a":' + "[" * 30_000,
        'start: %json {"multipleOf": 999983, "maximum": ' + "9" * 5000 + "}",
    ],
    ids=["large divisor", "in parts", "options", "deep", "long number"],
)
def test_schemas_in_a_grammar_are_checked_like_others(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        source.own_grammar(text, FIELD)
    assert refused.value.param == FIELD


def test_a_grammar_may_hold_schemas() -> None:
    assert source.own_grammar('start: "a" %json {"type": "integer", "multipleOf": 5} | %json {"type": "null"}', FIELD)


@pytest.mark.parametrize("pattern", ["([", "(?=a)b", r"(a)\1", "(" * 500 + "a" + ")" * 500, "(a{1000}){1000}{1000}"])
def test_a_pattern_that_cannot_be_enforced_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        COMPILER.require(source.regex_grammar(pattern, FIELD), FIELD)
    assert refused.value.param == FIELD


@pytest.mark.parametrize("choices", [[], [""], ["x"] * 1001])
def test_odd_choices_are_refused(choices: Sequence[str]) -> None:
    with pytest.raises(InvalidInput):
        source.choice_grammar(choices, FIELD)


@pytest.mark.parametrize("grammar", ["start: nowhere", "start: (" + "(" * 30_000, "no rules", "start: /(/"])
def test_a_grammar_that_is_none_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidInput):
        COMPILER.require(source.lark_grammar(grammar, FIELD), FIELD)


def test_what_is_compiled_is_kept_and_places_are_apart() -> None:
    compiler = GrammarCompiler(TOKENIZER)
    grammars = [source.regex_grammar(f"a{{{i}}}b", FIELD) for i in range(1, 200)]
    for grammar in grammars:
        compiler.require(grammar)
    first, second = compiler.constraint(grammars[0]), compiler.constraint(grammars[0])
    first.advance_to(TOKENIZER.encode("ab"))
    assert allowed(second) == TOKENIZER.encode("a")
    assert len(compiler._kept) == MAX_KEPT


def test_several_threads_may_compile() -> None:
    compiler, faults = GrammarCompiler(TOKENIZER), list[Exception]()
    grammars = [source.schema_grammar(obj(**{f"p{i % 7}": WORD}), FIELD) for i in range(60)]

    def compile_all() -> None:
        try:
            for grammar in grammars:
                compiler.constraint(grammar).advance_to(TOKENIZER.encode("{"))
        except Exception as exc:
            faults.append(exc)

    threads = [threading.Thread(target=compile_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_worn_grammar_is_renewed_and_its_outputs_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's lexer learns with every output, and stops at a limit that all outputs of a grammar share."""
    limits = llguidance.LLParserLimits(max_lexer_states=150, verbose_errors=False)
    monkeypatch.setattr(compiler_module, "_limits", lambda: limits)
    compiler, generous = GrammarCompiler(TOKENIZER), COMPILER
    grammar = source.regex_grammar("([a-m]{1,20} ){1,40}[a-z]", FIELD)
    lazy = _Ready(compiler)
    masks, renewed = RowMasks(lazy, VOCAB), 0
    renew = compiler.renew

    def counted(grammar: str) -> Constraint:
        nonlocal renewed
        renewed += 1
        return renew(grammar)

    monkeypatch.setattr(compiler, "renew", counted)
    for seed in range(6):
        truth, output, random = generous.constraint(grammar), list[int](), np.random.default_rng(seed)
        for _ in range(60):
            found = masks.now([ConstrainedRow(0, f"s{seed}", grammar, (tuple(output),))])
            assert not found.faults
            truth.advance_to(output)
            wanted = allowed(truth)
            assert np.flatnonzero(np.unpackbits(found.bits[0][0].view(np.uint8), bitorder="little")).tolist() == wanted
            if wanted == [EOS]:
                break
            output.append(int(random.choice([token for token in wanted if token != EOS])))
    assert renewed


def test_a_grammar_that_wears_at_once_ends_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=40, verbose_errors=False)
    monkeypatch.setattr(compiler_module, "_limits", lambda: limits)
    grammar = source.regex_grammar("(.*a.{12}b)|(.*b.{12}a)", FIELD)
    masks, output, random = RowMasks(_Ready(GrammarCompiler(TOKENIZER)), VOCAB), list[int](), np.random.default_rng(1)
    for _ in range(400):
        found = masks.now([ConstrainedRow(0, "s", grammar, (tuple(output),))])
        if found.faults:
            break
        bits = np.unpackbits(found.bits[0][0].view(np.uint8), bitorder="little")
        output.append(int(random.choice([token for token in np.flatnonzero(bits) if token != EOS])))
    assert found.faults == {0: "the grammar takes too much work"}


def test_special_tokens_are_never_text() -> None:
    """`<|im_start|>` may be written in a string, letter by letter, but not as the control token."""
    place = COMPILER.constraint(source.schema_grammar({"type": "string"}, FIELD))
    place.advance_to(TOKENIZER.encode('"'))
    assert not {0, 1, 2} & set(allowed(place))
    place.advance_to(TOKENIZER.encode('"<|im_start|>'))


class _Ready(LazyCompiler):
    def __init__(self, compiler: GrammarCompiler = COMPILER) -> None:
        self._made = compiler
        self._lock = threading.Lock()


def _lazy() -> LazyCompiler:
    return _Ready()


def test_a_folder_makes_its_compiler_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    lazy = LazyCompiler(folder)
    assert lazy.get() is lazy.get()
    assert lazy.get().eos_ids == (2,)
