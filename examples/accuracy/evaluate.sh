#!/bin/bash
# Evaluates the model of this checkout and writes lm-eval's folder to $1: what you gate on, in one place for both branches.
set -euo pipefail
python -m lm_eval --model hf --model_args "pretrained=./model" --tasks gsm8k,arc_easy --batch_size 8 \
  --log_samples --output_path "$1"
