"""Prompts of `loadtest.speculation`: texts that a model goes on to copy, and texts that it goes on with by itself."""

from __future__ import annotations

_CODE = """def read_orders(path):
    orders = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            name, count, price = line.rstrip().split(";")
            if not name:
                raise ValueError(f"line {number}: no name")
            orders.append({"name": name, "count": int(count), "price": float(price)})
    return orders


def total_of(orders):
    total = 0.0
    for order in orders:
        total += order["count"] * order["price"]
    return total
"""
_TABLE = """| city | country | river | inhabitants |
|---|---|---|---|
| Basel | Switzerland | Rhine | 173000 |
| Vienna | Austria | Danube | 1930000 |
| Lyon | France | Rhone | 522000 |
| Porto | Portugal | Douro | 231000 |
| Krakow | Poland | Vistula | 780000 |
| Seville | Spain | Guadalquivir | 684000 |
"""
_LETTER = """Dear Ms Harrow,

thank you for your letter of the ninth of May. The two pumps that you ordered left our works in Leeds on Tuesday and
will reach the harbour by the end of the week. The invoice comes with them. Should a seal be missing, our workshop in
Hull has all sizes in store and sends them on the same day.

With kind regards,
Tom Ashby
"""
_CONFIG = """[server]
host = "0.0.0.0"
port = 8443
workers = 12
timeout_seconds = 90

[database]
url = "postgres://reader@db.internal:5432/orders"
pool_size = 20
retry_after_seconds = 3

[cache]
folder = "/var/cache/orders"
most_bytes = 1073741824
"""

COPIES = tuple(
    f"The file, as it is:\n\n{text}\nThe same file once more, without any change:\n\n{text}\n"
    f"The same file once more, without any change:\n\n{text[: len(text) // 8]}"
    for text in (_CODE, _TABLE, _LETTER, _CONFIG)
)
PLAIN = (
    "The history of the lighthouse on the northern cape begins with a storm in which three ships were lost. That",
    "Photosynthesis is the process by which plants make sugar out of light, water and carbon dioxide. At first,",
    "My grandmother kept bees behind the house, and every summer we were allowed to help her with the honey. One",
    "A good translation is more than a list of words in another language. Whoever translates a poem must decide",
)
