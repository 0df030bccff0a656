import mcbn
from trained import digits

net, train_loader, val, (x, y) = digits()  # your trained network, its training data

bayes = mcbn.MCBN(net, "classification").fit(train_loader, n_samples=100)
bayes.tune(val)  # optional: a temperature, on held-out labels
pred = bayes.predict(x)

print("label      ", pred.label[:6].tolist())
print("certain    ", [round(p, 2) for p in pred.probs[:6].max(1).values.tolist()])
print("epistemic  ", [round(i, 3) for i in pred.mutual_information[:6].tolist()])
right = (pred.label == y).float()
surer = pred.entropy < pred.entropy.median()
print(f"accuracy    {right.mean():.3f}, of the surer half {right[surer].mean():.3f}")
