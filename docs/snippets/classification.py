import mcbn
from trained import digits

net, train_loader, val, (x, y) = digits()  # your network and data

bayes = mcbn.MCBN(net, "classification").fit(train_loader, n_samples=100)
bayes.tune(val)  # optional: a temperature, on held-out labels
pred = bayes.predict(x)

certain, epistemic = pred.probs.max(1).values, pred.mutual_information
for i in range(4):
    print(f"a {pred.label[i]}, {certain[i]:.0%} sure, epistemic {epistemic[i]:.4f}; true: {y[i]}")
right = (pred.label == y).float()
surer = pred.entropy < pred.entropy.median()
print(f"accuracy {right.mean():.3f}, of the surer half {right[surer].mean():.3f}")
