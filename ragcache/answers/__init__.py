"""Answer features: quotations, confidence, and the policies that apply them to a request."""
