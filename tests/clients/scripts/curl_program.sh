# curl, as the documentation of each API shows it.
URL=$1 MODEL=$2
failed=0

case_() { # name, text that the answer must have, arguments of curl
    name=$1 expected=$2
    shift 2
    if answer=$(curl -sS --fail-with-body "$@" 2>&1) && grep -q -- "$expected" <<<"$answer"
    then echo "case $name ok"
    else echo "case $name failed: ${answer:0:300}"; failed=1
    fi
}
chat='"model": "'$MODEL'", "temperature": 0, "max_tokens": 24, "messages": [
    {"role": "user", "content": "What is the capital of France?"}]'
json=(-H "Content-Type: application/json")
case_ plain Paris "$URL/v1/chat/completions" "${json[@]}" -d "{$chat}"
case_ stream "data: \[DONE\]" -N "$URL/v1/chat/completions" "${json[@]}" \
    -d "{$chat, \"stream\": true}"
case_ anthropic '"type": *"message"' "$URL/v1/messages" "${json[@]}" \
    -H "x-api-key: none" -H "anthropic-version: 2023-06-01" -d "{$chat}"
# Ollama's documentation sends no content type: curl's own is a form's.
case_ ollama '"done": *true' "$URL/api/generate" \
    -d "{\"model\": \"$MODEL\", \"prompt\": \"Once\", \"options\": {\"num_predict\": 8}}"
case_ models "$MODEL" "$URL/v1/models"
case_ embeddings '"embedding"' "$URL/v1/embeddings" "${json[@]}" \
    -d "{\"model\": \"$MODEL\", \"input\": \"a\"}"
exit $failed
