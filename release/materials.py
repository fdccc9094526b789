"""The bill of materials of a wheel: what the library contains beside our code (CycloneDX)."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
import uuid

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

GCC = LicenseExpression("GPL-3.0-or-later WITH GCC-exception-3.1")
CUDA = DisjunctiveLicense(name="NVIDIA CUDA Toolkit End User License Agreement")
# Package, what of it is in the library, licence; release/licenses/THIRD_PARTY.md has the same.
OF_CUDA = (
    ("nvidia-cuda-runtime", "libcudart_static, linked statically, and headers", CUDA),
    ("nvidia-nvvm", "libdevice, compiled into the kernels", CUDA),
    ("nvidia-cuda-crt", "headers", CUDA),
    ("nvidia-cuda-cccl", "header nv/target", LicenseExpression("Apache-2.0 WITH LLVM-exception")),
)


def bill(version: str, report: dict[str, str]) -> str:
    """Of our version and the report of its build (``_build.json``): JSON, the same for the same."""
    package = component("bapo-kernels", version, "", LicenseExpression("Apache-2.0"))
    parts = components(report)
    name = ", ".join(f"{part.name} {part.version}" for part in [package, *parts])
    bom = Bom(components=parts, serial_number=uuid.uuid5(uuid.NAMESPACE_OID, name))
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc)
    bom.metadata.component = package
    bom.register_dependency(package, bom.components)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"the bill of materials breaks the schema: {error}")
    return text + "\n"


def components(report: dict[str, str]) -> list[Component]:
    # "g++ (Debian 12.2.0-14) 12.2.0", "g++ (GCC) 14.2.1 20250110 (Red Hat 14.2.1-7)"
    found = re.search(r"\) (\d+\.\d+\.\d+)", report["compiler"])
    gcc = found[1] if found else report["compiler"]
    parts = [
        component("libstdc++", gcc, "linked statically", GCC, on_pypi=False),
        component("libgcc", gcc, "its static part", GCC, on_pypi=False),
        component(
            "torch",
            report["torch"].partition("+")[0],
            "headers of the stable ABI; the library itself is not in the wheel",
            LicenseExpression("BSD-3-Clause"),
        ),
    ]
    if "cuda" in report:
        release = report["cuda"].partition(" ")[0]
        parts += [component(name, installed(name) or release, *rest) for name, *rest in OF_CUDA]
    return parts


def component(
    name: str, version: str, what: str, license: License, on_pypi: bool = True
) -> Component:
    return Component(
        name=name,
        version=version,
        bom_ref=name,
        type=ComponentType.LIBRARY,
        description=what or None,
        licenses=[license],
        purl=PackageURL("pypi", name=name, version=version) if on_pypi else None,
    )


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
