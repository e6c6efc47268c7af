"""Where the gateway meets the network: TLS, proxies that are believed and others, pages of other origins."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import secrets
import ssl
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.gateway.edge import NO_EDGE, Edge, make_edge
from services.gateway.guesses import GUESSES
from shared.contracts.errors import SettingsError
from shared.settings.load import ROOT
from shared.settings.sections import Settings
from tests.pipeline.gateway_support import HEADERS, chat, gateway_stack, http_stack

PAGE = "https://app.example.com"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """A certificate of 127.0.0.1 and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, encryption_algorithm=serialization.NoEncryption())
    )
    return str(paths[0]), str(paths[1])


@pytest.mark.parametrize("tls", [False, True])
async def test_a_containers_health_check_sees_whether_it_is_ready(pair: tuple[str, str], tls: bool) -> None:
    command = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["gateway"]["healthcheck"]["test"]
    edge = Edge(*pair) if tls else NO_EDGE
    async with http_stack(edge=edge) as (stack, url):
        code = command[-1].replace("127.0.0.1:8080", url.removeprefix("http://"))
        assert code != command[-1]

        async def healthy() -> bool:
            done = await asyncio.create_subprocess_exec(
                sys.executable, "-IS", "-c", code, stderr=asyncio.subprocess.PIPE
            )
            await done.communicate()
            return done.returncode == 0

        assert await healthy()
        stack.service.checks = lambda: {"scheduler": False}  # type: ignore[method-assign]
        assert not await healthy()
    assert not await healthy()


async def test_with_a_certificate_it_speaks_tls_and_nothing_else(pair: tuple[str, str]) -> None:
    async with http_stack(edge=make_edge(*pair, "", "")) as (stack, url):
        context = ssl.create_default_context(cafile=pair[0])
        async with httpx.AsyncClient(verify=context, base_url=url.replace("http:", "https:")) as client:
            async with client.stream(
                "POST", "/v1/chat/completions", json=chat(stream=True), headers=HEADERS
            ) as response:
                assert (await response.aread()).endswith(b"data: [DONE]\n\n")
            whole = await client.post("/v1/chat/completions", json=chat(), headers=HEADERS)
            assert whole.status_code == 200
        async with httpx.AsyncClient(base_url=url) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get("/health")
        await stack.settled(2)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (("x.pem", "", "", ""), "gateway.tls_key"),
        (("", "x.pem", "", ""), "gateway.tls_cert"),
        (("/nowhere/x.pem", "/nowhere/y.pem", "", ""), "gateway.tls_cert"),
        (("", "", "10.0.0.0/8, proxy.local", ""), "gateway.trusted_proxies"),
        (("", "", "10.0.0.1/8", ""), "gateway.trusted_proxies"),
        (("", "", "*", ""), "gateway.trusted_proxies"),
        (("", "", "", "app.example.com"), "gateway.cors_origins"),
        (("", "", "", "https://app.example.com/"), "gateway.cors_origins"),
        (("", "", "", "https://*.example.com"), "gateway.cors_origins"),
    ],
)
def test_what_is_wrong_with_a_setting_is_told(given: tuple[str, str, str, str], param: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make_edge(*given)
    assert caught.value.param == param


def test_nothing_is_open_unless_it_is_asked_for() -> None:
    door = Settings().gateway
    assert door.host == "127.0.0.1"
    assert make_edge(door.tls_cert, door.tls_key, door.trusted_proxies, door.cors_origins) == NO_EDGE


def test_files_that_are_no_certificate_and_its_key_are_told(pair: tuple[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("nothing of the kind")
    for cert, key in ((pair[0], str(other)), (str(other), pair[1]), (pair[1], pair[0])):
        with pytest.raises(SettingsError) as caught:
            make_edge(cert, key, "", "")
        assert caught.value.param == "gateway.tls_cert"
    assert make_edge("", "", " 10.0.0.0/8 ,::1,", "https://a.example, *") == Edge(
        proxies=("10.0.0.0/8", "::1/128"), origins=("https://a.example", "*")
    )


@pytest.mark.parametrize("trusted", [False, True])
async def test_the_address_a_proxy_tells_is_believed_if_it_is_trusted(trusted: bool) -> None:
    edge = Edge(proxies=("127.0.0.0/8",) if trusted else ("10.0.0.0/8",))
    async with http_stack(edge=edge) as (_, url), httpx.AsyncClient(base_url=url) as client:

        async def guess(address: str) -> int:
            headers = {"authorization": f"Bearer {secrets.token_hex(8)}", "x-forwarded-for": address}
            return (await client.get("/v1/models", headers=headers)).status_code

        many = [await guess("203.0.113.7") for _ in range(2 * int(GUESSES))]
        assert set(many) == {401, 429}
        # another client of the same proxy
        assert await guess("203.0.113.8") == (401 if trusted else 429)


async def test_pages_of_other_origins_may_ask_where_they_are_listed_only() -> None:
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with gateway_stack() as closed:
        answer = await closed.client.get("/v1/models", headers={**HEADERS, "origin": PAGE})
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (200, False)
        assert (await closed.client.options("/v1/chat/completions", headers=asked)).status_code == 401
    async with gateway_stack(edge=make_edge("", "", "", PAGE)) as opened:
        before = await opened.client.options("/v1/chat/completions", headers=asked)
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in before.headers["access-control-allow-headers"].lower()
        for headers in ({**HEADERS, "origin": PAGE}, {"origin": PAGE}):  # a page reads refusals too
            answer = await opened.client.get("/v1/models", headers=headers)
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "retry-after" in answer.headers["access-control-expose-headers"].lower()
            assert "access-control-allow-credentials" not in answer.headers
        other = await opened.client.get("/v1/models", headers={**HEADERS, "origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in other.headers
        asked["origin"] = "https://evil.example.com"
        refused = await opened.client.options("/v1/chat/completions", headers=asked)
        assert "access-control-allow-origin" not in refused.headers
