"""The bodies of requests and responses, and the document that describes them."""
