"""The examples for compose and Kubernetes, without running either: the names exist, and the files agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from lmcache_async.config import load_config
from lmcache_async.config.values import parse_size
from lmcache_async.daemon.config import load_daemon_config
from lmcache_async.integration.vllm.plugin import NAME
from tests.packaging.deployments import EXAMPLES, address, checked, documents, option, transfer_config

COMPOSE, KUBERNETES = EXAMPLES / "compose", EXAMPLES / "kubernetes"
MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))
RESOURCES = [resource for path in MANIFESTS for resource in documents(path)]
KUBERNETES_VERSIONS = ("1.28", "1.34")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    [compose] = documents(COMPOSE / "compose.yaml")
    return compose["services"]


def resource(kind: str, name: str) -> dict[str, Any]:
    [found] = [one for one in RESOURCES if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod(name: str) -> dict[str, Any]:
    return resource("Deployment", name)["spec"]["template"]["spec"]


def container(name: str) -> dict[str, Any]:
    [found] = pod(name)["containers"]
    return found


def check_engine(arguments: list[str]) -> None:
    """Check that vLLM's options name an existing connector with valid settings."""
    transfer = transfer_config(arguments)
    assert transfer["kv_connector"] == NAME
    assert transfer["kv_role"] == "kv_both"
    load_config(env={}, extra=transfer.get("kv_connector_extra_config"))


def test_the_image_has_the_vllm_that_is_tested() -> None:
    dockerfile = (COMPOSE / "Dockerfile").read_text(encoding="utf-8")
    tested = re.search(
        r"^vllm==(\S+)$",
        (EXAMPLES.parent / "requirements/vllm-gpu.txt").read_text(encoding="utf-8"),
        re.MULTILINE,
    )

    assert tested
    assert f"FROM vllm/vllm-openai:v{tested[1]}\n" in dockerfile


def test_both_engines_of_compose_are_the_same_but_for_port_and_gpu(services: dict[str, Any]) -> None:
    engines = {name: service for name, service in services.items() if name.startswith("vllm")}
    apart = [{k: v for k, v in one.items() if k not in {"ports", "deploy"}} for one in engines.values()]
    ports = [port.split(":") for one in engines.values() for port in one["ports"]]

    assert len(engines) == 2
    assert apart[0] == apart[1]
    assert len({outside for outside, _ in ports}) == 2
    assert {inside for _, inside in ports} == {option(apart[0]["command"], "--port")} == {"8000"}
    assert ":8000/" in apart[0]["healthcheck"]["test"][-1]
    assert apart[0]["entrypoint"] == ["vllm", "serve"]
    dockerfile = COMPOSE / apart[0]["build"]["context"] / apart[0]["build"]["dockerfile"]
    assert dockerfile.resolve() == COMPOSE / "Dockerfile"
    check_engine(apart[0]["command"])


def test_the_config_of_compose_names_its_servers_and_files(services: dict[str, Any], tmp_path: Path) -> None:
    engine, valkey = services["vllm-a"], services["valkey"]
    mounted = dict(reversed(volume.removesuffix(":ro").split(":")) for volume in engine["volumes"])
    file = COMPOSE / mounted[engine["environment"]["LMCACHE_ASYNC_CONFIG_FILE"]]
    [secret] = engine["secrets"]

    text = file.read_text(encoding="utf-8")

    config = checked(text, tmp_path)

    host, port = address(config, "valkey")
    assert text.count(f"/run/secrets/{secret}") == 1
    assert services[host] is valkey
    assert valkey["expose"] == [str(port)]
    assert f"--port {port} " in valkey["command"][0]
    assert valkey["secrets"] == [secret]
    assert valkey["command"][0].count(f"/run/secrets/{secret}") == 1
    assert engine["depends_on"] == {host: {"condition": "service_healthy"}}
    assert documents(COMPOSE / "compose.yaml")[0]["secrets"] == {secret: {"file": "./valkey-password.txt"}}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("one", RESOURCES, ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_each_manifest_fits_the_schema(one: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("name", ["vllm", "valkey"])
def test_services_find_their_pods_and_ports(name: str) -> None:
    deployment, service = resource("Deployment", name)["spec"], resource("Service", name)["spec"]
    ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
    probes = [probe for key, probe in container(name).items() if key.endswith("Probe")]

    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert {port["targetPort"] for port in service["ports"]} <= ports.keys()
    assert all((probe.get("httpGet") or probe["tcpSocket"])["port"] in ports for probe in probes)
    assert {mount["name"] for mount in container(name).get("volumeMounts", [])} == {
        volume["name"] for volume in pod(name).get("volumes", [])
    }


def test_the_config_of_kubernetes_names_its_servers_and_files(tmp_path: Path) -> None:
    engine, server = container("vllm"), container("valkey")
    mounts = {mount["mountPath"]: mount["name"] for mount in engine["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod("vllm")["volumes"]}
    [variable] = engine["env"]
    place = Path(variable["value"])
    content = resource("ConfigMap", volumes[mounts[str(place.parent)]]["configMap"]["name"])["data"]
    secret = volumes[mounts["/run/secrets/valkey"]]["secret"]
    [password] = server["env"]

    config = checked(content[place.name], tmp_path)

    assert content[place.name].count("/run/secrets/valkey/password") == 1
    assert variable["name"] == "LMCACHE_ASYNC_CONFIG_FILE"
    assert secret["secretName"] == password["valueFrom"]["secretKeyRef"]["name"]
    assert password["valueFrom"]["secretKeyRef"]["key"] == "password"
    assert secret["defaultMode"] == 0o400
    host, port = address(config, "valkey")
    assert port in {one["port"] for one in resource("Service", host)["spec"]["ports"]}
    assert server["args"][server["args"].index("--port") + 1] == str(port)
    assert option(engine["args"], "--port") == str(engine["ports"][0]["containerPort"])
    assert engine["command"] == ["vllm", "serve"]
    check_engine(engine["args"])


def test_pods_have_the_memory_that_their_configs_take(tmp_path: Path) -> None:
    text = resource("ConfigMap", "lmcache-async")["data"]["config.yaml"]
    config = checked(text, tmp_path)
    arguments = container("valkey")["args"]
    most = arguments[arguments.index("--maxmemory") + 1]

    assert config.arena.max_bytes < _limit("vllm")
    assert 1.15 * parse_size(most.replace("gb", "GiB")) < _limit("valkey")


def test_the_daemon_listens_at_the_socket_of_the_engines() -> None:
    spec = resource("DaemonSet", "lmcache-async-host")["spec"]["template"]["spec"]
    [daemon] = spec["containers"]
    given = {name: option(daemon["args"], f"--{name.replace('_', '-')}") for name in ("socket", "max_bytes")}

    config = load_daemon_config(None, given)

    assert len(daemon["args"]) == len(given)
    assert daemon["command"] == ["lmcache-async", "serve"]
    assert daemon["image"] == container("vllm")["image"]
    assert config.socket is not None
    [mount] = daemon["volumeMounts"]
    assert str(config.socket.parent) == mount["mountPath"]
    assert mount in container("vllm")["volumeMounts"]
    assert spec["volumes"][0] in pod("vllm")["volumes"]
    assert config.max_bytes < parse_size(f"{daemon['resources']['limits']['memory']}B")
    tier = {"name": "host", "socket": str(config.socket)}
    assert [one.name for one in load_config(env={}, extra={"tiers": ["cpu", tier]}).tiers] == ["cpu", "host"]
    assert str(config.socket) in (KUBERNETES / "README.md").read_text(encoding="utf-8")


def _limit(name: str) -> int:
    return parse_size(f"{container(name)['resources']['limits']['memory']}B")
