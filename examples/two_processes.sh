#!/bin/sh
# Two processes of four virtual CPU devices on this machine: two_processes.sh PYTHON [PORT]. Fails if one of them fails.
python="$1"; port="${2:-12789}"
here="$(dirname "$0")/several_processes.py"
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
"$python" "$here" "127.0.0.1:$port" 2 1 &
other=$!
"$python" "$here" "127.0.0.1:$port" 2 0 || { kill "$other" 2>/dev/null; exit 1; }
wait "$other"
