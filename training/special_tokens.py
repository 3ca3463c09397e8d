"""The reader's control tokens; their ids are their places in `ALL`."""

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
NO_ANSWER = "<|no_answer|>"  # the whole answer where the documents hold none
ALL = [PAD, USER, ASSISTANT, END, NO_ANSWER]
