#!/usr/bin/env bash
# Whether the tag, as v1.2.3, is the version of the package and has its date in the changelog.
set -euo pipefail
cd "$(dirname "$0")/.."

tag=$1
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' bapo_kernels/__init__.py)
if [[ $tag != "v$version" ]]; then
  echo "the tag must be v$version, the version of the package, got $tag" >&2
  exit 1
fi
if ! grep -qE "^## ${version//./\\.} \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md; then
  echo "CHANGELOG.md must have the heading '## $version (YYYY-MM-DD)'" >&2
  exit 1
fi
