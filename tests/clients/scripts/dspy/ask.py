import dspy

dspy.configure(
    lm=dspy.LM(
        "openai/ragcache-reader",
        api_base="http://127.0.0.1:8000/v1/collections/handbook",
        api_key="YOUR_KEY",
    )
)
question = "Where does the key of the pool car hang?"

print(dspy.settings.lm(question))
