"""The bill of materials of a wheel: what the library contains beside our code (CycloneDX)."""

from __future__ import annotations

import importlib.metadata
import re

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL


def bill(version: str, report: dict[str, str]) -> str:
    """Of our version and the report of its build (``_build.json``); validated JSON."""
    package = Component(
        name="bapo-kernels",
        version=version,
        type=ComponentType.LIBRARY,
        licenses=[LicenseExpression("Apache-2.0")],
        purl=PackageURL("pypi", name="bapo-kernels", version=version),
    )
    bom = Bom(components=components(report))
    bom.metadata.component = package
    bom.register_dependency(package, bom.components)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"the bill of materials breaks the schema: {error}")
    return text + "\n"


def components(report: dict[str, str]) -> list[Component]:
    """What ``licenses/THIRD_PARTY.md`` names, with versions."""
    gcc = re.search(r"\d+\.\d+\.\d+$", report["compiler"])
    found = [
        Component(
            name="libstdc++",
            version=gcc[0] if gcc else report["compiler"],
            description="linked statically",
            licenses=[LicenseExpression("GPL-3.0-or-later WITH GCC-exception-3.1")],
        ),
        Component(
            name="torch",
            version=report["torch"],
            description="headers of the stable ABI; the library itself is not in the wheel",
            licenses=[LicenseExpression("BSD-3-Clause")],
            purl=PackageURL("pypi", name="torch", version=report["torch"].partition("+")[0]),
        ),
    ]
    if "cuda" in report:
        found.append(cuda_runtime(report["cuda"].partition(" ")[0]))
    return found


def cuda_runtime(release: str) -> Component:
    """Of the package on PyPI, where that is what was linked."""
    name = "nvidia-cuda-runtime"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = release
    return Component(
        name=name,
        version=version,
        description="libcudart_static, linked statically, and headers",
        licenses=[DisjunctiveLicense(name="NVIDIA CUDA Toolkit End User License Agreement")],
        purl=PackageURL("pypi", name=name, version=version),
    )
